"""Layers whose values are the first channels of their keys: multi-head latent attention.

A token's key is its latent, d_v channels, and the channels that RoPE turns, d_k - d_v. The cache
holds keys only. Sinks and tail are key pages of d_k channels. An encoded page is two key pages of
its format side by side, one for each part: so no scale, norm or minimum spans both, and a transform
maps the latent alone. In formats with a scale for each block of 32 channels that changes no byte's
meaning where 32 divides d_v.
Source: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pykv.backends import transforms
from pykv.backends.base import F32, PAGE, U8, LayerShape
from pykv.formats.base import Side
from pykv.formats.coded import HeadNumbers, find

Parts = tuple[HeadNumbers, HeadNumbers]  # of the latent, and of the channels that turn


def key_format(name: str, shape: LayerShape) -> Any:
    """What encodes and decodes the encoded key pages of a layer."""
    return LatentPages(find(name), shape.d_k - shape.d_v) if shape.shared else find(name)


def key_width(transform: str, shape: LayerShape) -> int:
    """Channels of a layer's encoded key pages."""
    if not shape.shared:
        return transforms.width(transform, shape.d_k)
    return transforms.width(transform, shape.d_v) + shape.d_k - shape.d_v


def key_maps(transform: str, shape: LayerShape, numbers: Sequence[HeadNumbers]) -> F32 | None:
    """The transform of whole keys, f32 [G or 1, d_k, channels of pages]; None: there is none.

    `numbers` are those of the latent.
    """
    maps = transforms.matrices(transform, shape.d_v, numbers)
    if maps is None:
        return None
    rest = shape.d_k - shape.d_v
    whole = np.zeros((len(maps), shape.d_k, maps.shape[2] + rest), np.float32)
    whole[:, : shape.d_v, : maps.shape[2]] = maps
    whole[:, shape.d_v :, maps.shape[2] :] = np.eye(rest, dtype=np.float32)
    return whole


class LatentPages:
    """Encoded pages of such a layer in a format; the last `rest` channels are the second part."""

    def __init__(self, format_: Any, rest: int) -> None:
        self._format, self._rest = format_, rest

    def page_bytes(self, d: int, side: Side, n: int = PAGE) -> int:
        """Bytes of a page whose keys have d channels."""
        return sum(self._format.page_bytes(part, side, n) for part in (d - self._rest, self._rest))

    def encode_keys(self, x: F32, numbers: Parts | None = None) -> U8:
        """f32 [64, d] -> a page, u8."""
        cut, given = x.shape[1] - self._rest, _given(numbers)
        parts = (x[:, :cut], x[:, cut:])
        pages = [
            self._format.encode_keys(np.ascontiguousarray(part), **more)
            for part, more in zip(parts, given, strict=True)
        ]
        return np.concatenate(pages)

    def decode_keys(self, page: U8, d: int, n: int = PAGE, numbers: Parts | None = None) -> F32:
        """A page, u8 -> f32 [64, d]."""
        widths = (d - self._rest, self._rest)
        cut = self._format.page_bytes(widths[0], "key", n)
        parts = [
            self._format.decode_keys(part, width, n, **more)
            for part, width, more in zip(
                (page[:cut], page[cut:]), widths, _given(numbers), strict=True
            )
        ]
        return np.concatenate(parts, axis=1)


def _given(numbers: Parts | None) -> list[dict[str, HeadNumbers]]:
    return [{}, {}] if numbers is None else [{"numbers": part} for part in numbers]
