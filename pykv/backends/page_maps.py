"""What the kernels need to read a layer's encoded pages, beside their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pykv.backends import transforms
from pykv.backends.base import F32, I64, PAGE, CacheFormats, LayerShape, Rope
from pykv.formats.coded import HeadNumbers, find

LEVELS = 16  # entries of a table of levels; shorter ones are repeated
HEADER = 32  # float32 before a head's ranges; see coded_pages_numba.py


class PageMaps:
    """A layer's transforms, and the numbers of its formats that lie outside the pages."""

    def __init__(
        self,
        shape: LayerShape,
        formats: CacheFormats,
        numbers: Sequence[Sequence[HeadNumbers]],
    ) -> None:
        keys, values = numbers or ((), ())
        self.n_kv = shape.n_kv
        self.d_k = transforms.width(formats.transform_k, shape.d_k)
        self.d_v = transforms.width(formats.transform_v, shape.d_v)
        self.matrix_k, _ = matrices(formats.transform_k, shape.d_k, keys)
        self.matrix_v, self.back_v = matrices(formats.transform_v, shape.d_v, values)
        self.distance_k, self.distance_v = _distance(self.matrix_k), _distance(self.matrix_v)
        self.distance_back_v = _distance(self.back_v)
        self.extra_k = _extra(formats.page_k, shape.n_kv, self.d_k, keys)
        self.extra_v = _extra(formats.page_v, shape.n_kv, self.d_v, values)


def matrices(
    transform: str, d: int, numbers: Sequence[HeadNumbers]
) -> tuple[F32 | None, F32 | None]:
    """The maps f32 [KV heads or 1, D, R] and those back, rows filled up to 16 columns."""
    maps = transforms.matrices(transform, d, numbers)
    if maps is None:
        return None, None
    return _filled(maps), _filled(maps.transpose(0, 2, 1))


def _filled(maps: F32) -> F32:
    filled = np.zeros((*maps.shape[:2], (maps.shape[2] + 15) // 16 * 16), np.float32)
    filled[:, :, : maps.shape[2]] = maps
    return filled


def _distance(maps: F32 | None) -> int:
    """Bytes from one KV head's matrix to the next one's; 0 where all share one."""
    return 0 if maps is None or len(maps) == 1 else int(maps[0].nbytes)


def _extra(name: str, n_kv: int, d: int, numbers: Sequence[HeadNumbers]) -> F32:
    """f32 [KV heads, n] of a format: scales, or levels and ranges."""
    format_: Any = find(name)
    if format_.calibration == "scale":
        scales = [1 if n.scale is None else float(n.scale) for n in numbers]
        return np.array(scales or [1] * n_kv, np.float32)[:, None]
    if format_.calibration != "levels":
        return np.zeros((n_kv, 1), np.float32)
    extra = np.zeros((n_kv, HEADER + 2 * d), np.float32)
    for row, head in zip(extra, numbers, strict=True):
        row[:LEVELS] = np.resize(np.asarray(head.levels), LEVELS)
        row[LEVELS] = format_.n_outliers(d)
        row[LEVELS + 1] = format_.n_ends(d)
        if head.scale is not None and head.centre is not None:
            row[HEADER : HEADER + d], row[HEADER + d :] = head.scale, head.centre
    return extra


class Turns:
    """Angles for keys that are stored before RoPE; see kernels/position_numba.py."""

    def __init__(self, rope: Rope | None, sinks: int, n_entries: int) -> None:
        self.tables = _angles(rope, sinks, n_entries) if rope is not None else ()
        self.words: I64 = np.zeros(8, np.int64)
        if rope is not None:
            self.words[:4] = [table.ctypes.data for table in self.tables]
            half = rope.n_rot // 2
            self.words[4:7] = (half, half, 1) if rope.neox else (half, 1, 2)


@lru_cache(maxsize=16)
def _angles(rope: Rope, sinks: int, n_entries: int) -> tuple[F32, ...]:
    """Cosines and sines of 64 offsets, [pairs][64], and of entries' first positions."""
    offsets = rope.tables(np.arange(PAGE))
    starts = np.maximum(sinks + (np.arange(n_entries) - 1) * PAGE, 0)
    starts[0] = 0
    cos, sin = rope.tables(starts)
    # the magnitude counts once, and is in the offsets
    factor = np.float32(1 / rope.magnitude)
    return (
        *(np.ascontiguousarray(table.T) for table in offsets),
        np.ascontiguousarray(cos * factor),
        np.ascontiguousarray(sin * factor),
    )
