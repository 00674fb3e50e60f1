"""What formats with codes share: how their codes and parameters lie in the pages of the KV cache.

A page is its codes, then float16 scales, then float16 minima. Codes go by runs of 16: in a key page
16 tokens of one channel, in the order (channel, token / 16), in a value page 16 channels of one
token, in the order (32-channel block, token, half). A code of 5 bits is split into sets of 4 and 1
bits, one of 3 into 2 and 1, and each set is stored whole after the other. A 16-byte unit of a set
of w bits holds 8 / w consecutive runs, run k in bits k * w and up of each byte.

Which values share a scale is the format's `key_axis` and `value_axis`:
block     32 channels of one token: [block][64 tokens], the last block of keys may be short
channel   32 tokens of one channel: [32-token group][channel]; keys only
token     all channels of one token: [64 tokens]
head      one for all pages of the layer and head, which lies outside: nothing
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pykv.errors import FormatError
from pykv.formats.base import (
    F32,
    PAGE_ALIGN,
    PAGE_TOKENS,
    RUN,
    U8,
    VALUE_CHANNELS,
    BlockFormat,
    Side,
    padded,
)

Axis = Literal["block", "channel", "token", "head"]
Parameters = tuple[F32, ...]  # of groups: the scale, and for some formats the minimum
SETS = {8: (8,), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of a code -> bits of its sets
GROUP_TOKENS = 32  # tokens of one channel that share a scale
MOST_SCALE = 65504.0  # a larger scale, of values that f16 would not hold, is stored as this


class CodedFormat(BlockFormat):
    """A format whose pages hold codes.  A subclass gives the data and the two functions below."""

    roles: ClassVar[tuple[str, ...]] = ("cache",)
    bits: ClassVar[int]  # of a code: 8, 5, 4, 3 or 2
    key_axis: ClassVar[Axis] = "block"
    value_axis: ClassVar[Axis] = "block"
    n_parameters: ClassVar[int] = 1  # float16 numbers of a group: a scale, and perhaps a minimum

    def quantize(self, x: F32, scale: F32 | None = None) -> tuple[U8, Parameters]:
        """f32 [..., n], a group of n values -> codes u8 [..., n], parameters f32 [..., 1].

        n is 32 or less for blocks, and the head's width for tokens. `scale` is that of a format
        whose axis is "head", f32 and broadcast. A page keeps parameters as float16, to which a
        format rounds them only where its codes depend on it.
        """
        raise NotImplementedError

    def dequantize(self, codes: U8, parameters: Parameters, scale: F32 | None = None) -> F32:
        """The values f32 [..., n] of what `quantize` returns."""
        raise NotImplementedError

    # pages

    def page_bytes(self, d: int, side: Side, n: int = PAGE_TOKENS) -> int:
        """Bytes of a page for a head of width d.  Raises FormatError: n is not 64."""
        self._check_tokens(n)
        used = self._code_bytes(d, side) + 2 * self.n_parameters * self._groups(d, side)
        return -(-used // PAGE_ALIGN) * PAGE_ALIGN

    def encode_keys(self, x: F32, scale: F32 | None = None) -> U8:
        """f32 [64, d] -> a key page, u8.  Raises FormatError: another number of tokens."""
        n, d = x.shape
        self._check_tokens(n)
        codes, arrays = np.empty((d, PAGE_TOKENS), np.uint8), []
        for place, group in _key_groups(x, self.key_axis):
            c, parameters = self._quantize(group, scale)
            codes[place] = _back(c, self.key_axis)
            arrays.append(parameters)
        return self._page(codes.reshape(-1, RUN), arrays, self.page_bytes(d, "key"))

    def decode_keys(self, page: U8, d: int, n: int = PAGE_TOKENS, scale: F32 | None = None) -> F32:
        """A key page, u8 -> f32 [64, d].  Raises FormatError: another size, or n is not 64."""
        self._check_tokens(n)
        codes, flat = self._parts(page, d, "key")
        codes = codes.reshape(d, PAGE_TOKENS)
        out, at = np.empty((d, PAGE_TOKENS), np.float32), 0
        for place, group in _key_groups(codes.T, self.key_axis):
            count = int(np.prod(group.shape[:-1]))
            parameters = tuple(
                p[at : at + count].reshape(*group.shape[:-1], 1) for p in flat if len(p)
            )
            out[place] = _back(self.dequantize(group, parameters, scale), self.key_axis)
            at += count
        return out.T

    def encode_values(self, x: F32, scale: F32 | None = None) -> U8:
        """f32 [64, d] -> a value page, u8.  Raises FormatError: another number of tokens."""
        n, d = x.shape
        self._check_tokens(n)
        codes, arrays = np.zeros((PAGE_TOKENS, padded(d)), np.uint8), []
        for first, stop in _value_blocks(d, self.value_axis):
            codes[:, first:stop], parameters = self._quantize(x[:, first:stop], scale)
            arrays.append(parameters)
        runs = codes.reshape(PAGE_TOKENS, -1, VALUE_CHANNELS).transpose(1, 0, 2)
        return self._page(runs.reshape(-1, RUN), arrays, self.page_bytes(d, "value"))

    def decode_values(
        self, page: U8, d: int, n: int = PAGE_TOKENS, scale: F32 | None = None
    ) -> F32:
        """A value page, u8 -> f32 [64, d].  Raises FormatError: as `decode_keys`."""
        self._check_tokens(n)
        runs, flat = self._parts(page, d, "value")
        blocks = runs.reshape(-1, PAGE_TOKENS, VALUE_CHANNELS)
        codes = blocks.transpose(1, 0, 2).reshape(PAGE_TOKENS, -1)
        out = np.empty((PAGE_TOKENS, d), np.float32)
        for i, (first, stop) in enumerate(_value_blocks(d, self.value_axis)):
            tokens = slice(i * PAGE_TOKENS, (i + 1) * PAGE_TOKENS)
            parameters = tuple(p[tokens, None] for p in flat if self.value_axis != "head")
            out[:, first:stop] = self.dequantize(codes[:, first:stop], parameters, scale)
        return out

    # parts of a page

    def _code_bytes(self, d: int, side: Side) -> int:
        runs = (d if side == "key" else padded(d)) * PAGE_TOKENS // RUN
        return sum(-(-runs * w // 8) * RUN for w in SETS[self.bits])

    def _groups(self, d: int, side: Side) -> int:
        axis = self.key_axis if side == "key" else self.value_axis
        blocks = -(-d // VALUE_CHANNELS)
        per_page: dict[str, int] = {
            "block": blocks * PAGE_TOKENS,
            "channel": d * PAGE_TOKENS // GROUP_TOKENS,
            "token": PAGE_TOKENS,
            "head": 0,
        }
        return per_page[axis]

    def _check_tokens(self, n: int) -> None:
        if n != PAGE_TOKENS:
            raise FormatError(f"{self.name}: a page takes {PAGE_TOKENS} tokens, not {n}")

    def _quantize(self, x: F32, scale: F32 | None) -> tuple[U8, Parameters]:
        # a group of zeros has no inverse scale, and one past f16's range may overflow: both are
        # dealt with after the fact
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return self.quantize(x, scale)

    def _page(self, runs: U8, arrays: list[Parameters], n_bytes: int) -> U8:
        parts = [_pack(runs, self.bits)]
        for i in range(self.n_parameters if arrays and arrays[0] else 0):
            joined = np.concatenate([np.ravel(p[i]) for p in arrays])
            stored = np.clip(joined, -MOST_SCALE, MOST_SCALE).astype("<f2")
            parts.append(stored.view(np.uint8))
        page = np.zeros(n_bytes, np.uint8)
        used = np.concatenate(parts)
        page[: len(used)] = used
        return page

    def _parts(self, page: U8, d: int, side: Side) -> tuple[U8, list[F32]]:
        """A page's codes as runs, and its parameters, flat."""
        n_bytes = self.page_bytes(d, side)
        if page.shape != (n_bytes,):
            raise FormatError(
                f"{self.name}: a page of shape {page.shape}, where {n_bytes} bytes were expected"
            )
        n_codes, n = self._code_bytes(d, side), self._groups(d, side)
        runs = (d if side == "key" else padded(d)) * PAGE_TOKENS // RUN
        flat = np.ascontiguousarray(page[n_codes : n_codes + 2 * n * self.n_parameters])
        numbers = flat.view("<f2").astype(np.float32)
        parameters = [numbers[i * n : (i + 1) * n] for i in range(self.n_parameters)]
        return _unpack(page[:n_codes], self.bits, runs), parameters


def _key_groups(x: npt.NDArray[Any], axis: Axis) -> list[tuple[Any, npt.NDArray[Any]]]:
    """[64, d] -> for each part of a key page its place in [d, 64], and its groups [..., n]."""
    d = x.shape[1]
    if axis == "block":
        return [
            (slice(first, min(first + VALUE_CHANNELS, d)), x[:, first : first + VALUE_CHANNELS])
            for first in range(0, d, VALUE_CHANNELS)
        ]
    if axis == "channel":
        return [
            ((slice(None), slice(t, t + GROUP_TOKENS)), x[t : t + GROUP_TOKENS].T)
            for t in range(0, PAGE_TOKENS, GROUP_TOKENS)
        ]
    return [(slice(None), x)]


def _back(groups: npt.NDArray[Any], axis: Axis) -> npt.NDArray[Any]:
    """Groups of keys as they lie in [d, 64]."""
    return groups if axis == "channel" else groups.T


def _value_blocks(d: int, axis: Axis) -> list[tuple[int, int]]:
    """First channel and end of each part of a value page that has its own scales."""
    if axis != "block":
        return [(0, d)]
    starts = range(0, d, VALUE_CHANNELS)
    return [(first, min(first + VALUE_CHANNELS, d)) for first in starts]


def _pack(runs: U8, bits: int) -> U8:
    """Codes u8 [runs, 16] -> the sets, one after the other."""
    sets, shift = [], 0
    for width in SETS[bits]:
        per_unit = 8 // width
        fill = -len(runs) % per_unit
        part = np.pad(runs >> np.uint8(shift) & np.uint8((1 << width) - 1), ((0, fill), (0, 0)))
        unit = np.zeros((len(part) // per_unit, RUN), np.uint8)
        for k in range(per_unit):
            unit |= part[k::per_unit] << np.uint8(k * width)
        sets.append(unit.reshape(-1))
        shift += width
    return np.concatenate(sets)


def _unpack(packed: U8, bits: int, n_runs: int) -> U8:
    """The sets -> codes u8 [runs, 16]."""
    codes, shift, at = np.zeros((n_runs, RUN), np.uint8), 0, 0
    for width in SETS[bits]:
        per_unit = 8 // width
        units = -(-n_runs // per_unit)
        unit = packed[at : at + units * RUN].reshape(units, RUN)
        part = np.empty((units * per_unit, RUN), np.uint8)
        for k in range(per_unit):
            part[k::per_unit] = unit >> np.uint8(k * width) & np.uint8((1 << width) - 1)
        codes |= part[:n_runs] << np.uint8(shift)
        shift, at = shift + width, at + units * RUN
    return codes
