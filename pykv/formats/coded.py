"""What formats with codes share: how their codes and parameters lie in the pages of the KV cache.

A page is its codes, then float16 scales, then float16 minima, then outliers. Codes go by runs of
16: in a key page 16 tokens of one channel, in the order (channel, token / 16), in a value page 16
channels of one token, in the order (32-channel block, token, half). A code of 5 bits is split into
sets of 4 and 1 bits, one of 3 into 2 and 1, and each set is stored whole after the other. A 16-byte
unit of a set of w bits holds 8 / w consecutive runs, run k in bits k * w and up of each byte.

Which values share a scale is the format's `key_axis` and `value_axis`:
block     32 channels of one token: [block][64 tokens], the last block of keys may be short
channel   32 tokens of one channel: [32-token group][channel]; keys only
token     all channels of one token: [64 tokens]
head      one for all pages of the layer and head, which lies outside: nothing

Outliers, in a format that has them, are u16 places of all, rising, then float16 values of all. A
place is a value's index in run order: channel * 64 + token in a key page, (block * 64 + token) * 32
+ channel % 32 in a value page. 0xFFFF is an unused entry. Such a value stands in the place of the
decoded one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pykv import registry
from pykv.errors import ConfigError, FormatError
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
UNUSED = 0xFFFF  # the place of an outlier that is none


@dataclass(frozen=True, eq=False)
class HeadNumbers:
    """What lies outside the pages of one layer's keys or values of one KV head.

    `scale` and `centre` broadcast against a group, f32: one number for fp8, [d] for the keys of
    nuq. None: the format needs no such number here, or does without.
    """

    scale: F32 | np.float32 | None = None
    centre: F32 | np.float32 | None = None
    levels: F32 | None = None  # f32 [2**bits], rising, from -1 to 1
    basis: F32 | None = None  # f32 [D, D]: a low-rank transform keeps its first columns


class CodedFormat(BlockFormat):
    """A format whose pages hold codes.  A subclass gives the data and the two functions below."""

    roles: ClassVar[tuple[str, ...]] = ("cache",)
    bits: ClassVar[int]  # of a code: 8, 5, 4, 3 or 2
    key_axis: ClassVar[Axis] = "block"
    value_axis: ClassVar[Axis] = "block"
    n_parameters: ClassVar[int] = 1  # float16 numbers of a group: a scale, and perhaps a minimum
    # what a calibration file holds for it: a scale, which is 1 without one, or what it cannot do
    # without: levels, and ranges of key channels
    calibration: ClassVar[Literal["none", "scale", "levels"]] = "none"
    key_position: ClassVar[Literal["write", "read"]] = "write"  # when RoPE turns the keys
    outliers: Fraction = Fraction(0)  # percent of a page's values that it also keeps as float16

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse, where the format is written, what pages have no layout for."""
        super().__init_subclass__(**kwargs)
        if getattr(cls, "bits", 8) not in SETS:
            raise FormatError(
                f"{cls.__name__}: codes have one of {', '.join(map(str, SETS))} bits, "
                f"not {cls.bits}"
            )

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """f32 [..., n], a group of n values -> codes u8 [..., n], parameters f32 [..., 1].

        n is 32 or less for blocks, and the head's width for tokens and heads. A page keeps
        parameters as float16, to which a format rounds them only where its codes depend on it.
        """
        raise NotImplementedError

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """The values f32 [..., n] of what `quantize` returns."""
        raise NotImplementedError

    def with_options(self, options: str) -> CodedFormat:
        """The format with the options after the colon.  Raises ConfigError: it has no such."""
        raise ConfigError(f"cache type {self.name} takes no options, and '{options}' was given")

    def within(self, x: F32, numbers: HeadNumbers | None) -> tuple[F32, Parameters]:
        """f32 [..., n] -> where each value lies in its range, -1 to 1, and scale and centre of it.

        For a format with levels.
        """
        raise NotImplementedError

    def beyond(self, x: F32, side: Side, numbers: HeadNumbers | None) -> F32:
        """f32 [64, d] -> how far each value lies outside its range; for a format with outliers."""
        raise NotImplementedError

    def set_apart(
        self, x: F32, side: Side, numbers: HeadNumbers | None
    ) -> tuple[F32, npt.NDArray[np.bool_]]:
        """A page's values [64, d] -> what its codes are of, and which are outliers.

        Of the values beyond their ranges the farthest are taken, of equally far ones the first in
        run order. For the ranges of values they then count as the nearest one of the rest.
        """
        taken, n = np.zeros(x.shape, bool), self.n_outliers(x.shape[1])
        if n == 0:
            return x, taken
        with np.errstate(over="ignore"):  # infinitely far is far enough
            distance = _in_run_order(self.beyond(x, side, numbers), side)
        places = np.argsort(-distance, kind="stable")[:n]
        taken[_at(places[distance[places] > 0], side)] = True
        if side == "key":  # whose ranges do not depend on what is left
            return x, taken
        low = x.min(-1, keepdims=True, where=~taken, initial=np.inf)
        high = x.max(-1, keepdims=True, where=~taken, initial=-np.inf)
        return np.clip(x, low, high), taken

    def n_outliers(self, d: int) -> int:
        """Entries for outliers in a page of a head of width d."""
        return math.ceil(self.outliers * PAGE_TOKENS * d / 100)

    # pages

    def page_bytes(self, d: int, side: Side, n: int = PAGE_TOKENS) -> int:
        """Bytes of a page for a head of width d.  Raises FormatError: n is not 64."""
        self._check_tokens(n)
        if self.outliers and PAGE_TOKENS * padded(d) > UNUSED:
            raise FormatError(f"{self.name}: a place is 16 bits, too few for a head of width {d}")
        used = self._code_bytes(d, side) + 2 * self.n_parameters * self._groups(d, side)
        used += 4 * self.n_outliers(d)
        return -(-used // PAGE_ALIGN) * PAGE_ALIGN

    def encode_keys(self, x: F32, numbers: HeadNumbers | None = None) -> U8:
        """f32 [64, d] -> a key page, u8.  Raises FormatError: another number of tokens."""
        n, d = x.shape
        self._check_tokens(n)
        n_bytes = self.page_bytes(d, "key")
        x, outliers = self._outliers(x, "key", numbers)
        codes, arrays = np.empty((d, PAGE_TOKENS), np.uint8), []
        for place, group in _key_groups(x, self.key_axis):
            c, parameters = self._quantize(group, numbers)
            codes[place] = _back(c, self.key_axis)
            arrays.append(parameters)
        return self._page(codes.reshape(-1, RUN), arrays, outliers, n_bytes)

    def decode_keys(
        self, page: U8, d: int, n: int = PAGE_TOKENS, numbers: HeadNumbers | None = None
    ) -> F32:
        """A key page, u8 -> f32 [64, d].  Raises FormatError: another size, or n is not 64."""
        self._check_tokens(n)
        codes, flat, outliers = self._parts(page, d, "key")
        codes = codes.reshape(d, PAGE_TOKENS)
        out, at = np.empty((d, PAGE_TOKENS), np.float32), 0
        for place, group in _key_groups(codes.T, self.key_axis):
            count = int(np.prod(group.shape[:-1]))
            parameters = tuple(
                p[at : at + count].reshape(*group.shape[:-1], 1) for p in flat if len(p)
            )
            out[place] = _back(self.dequantize(group, parameters, numbers), self.key_axis)
            at += count
        return _put(out.T, "key", outliers)

    def encode_values(self, x: F32, numbers: HeadNumbers | None = None) -> U8:
        """f32 [64, d] -> a value page, u8.  Raises FormatError: another number of tokens."""
        n, d = x.shape
        self._check_tokens(n)
        n_bytes = self.page_bytes(d, "value")
        x, outliers = self._outliers(x, "value", numbers)
        codes, arrays = np.zeros((PAGE_TOKENS, d), np.uint8), []
        for first, stop in _value_blocks(d, self.value_axis):
            codes[:, first:stop], parameters = self._quantize(x[:, first:stop], numbers)
            arrays.append(parameters)
        runs = _in_run_order(codes, "value").reshape(-1, RUN)
        return self._page(runs, arrays, outliers, n_bytes)

    def decode_values(
        self, page: U8, d: int, n: int = PAGE_TOKENS, numbers: HeadNumbers | None = None
    ) -> F32:
        """A value page, u8 -> f32 [64, d].  Raises FormatError: as `decode_keys`."""
        self._check_tokens(n)
        runs, flat, outliers = self._parts(page, d, "value")
        blocks = runs.reshape(-1, PAGE_TOKENS, VALUE_CHANNELS)
        codes = blocks.transpose(1, 0, 2).reshape(PAGE_TOKENS, -1)
        out = np.empty((PAGE_TOKENS, d), np.float32)
        for i, (first, stop) in enumerate(_value_blocks(d, self.value_axis)):
            tokens = slice(i * PAGE_TOKENS, (i + 1) * PAGE_TOKENS)
            parameters = tuple(p[tokens, None] for p in flat if self.value_axis != "head")
            out[:, first:stop] = self.dequantize(codes[:, first:stop], parameters, numbers)
        return _put(out, "value", outliers)

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

    def _quantize(self, x: F32, numbers: HeadNumbers | None) -> tuple[U8, Parameters]:
        # a group of zeros has no inverse scale, and one past f16's range may overflow: both are
        # dealt with after the fact
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return self.quantize(x, numbers)

    def _outliers(self, x: F32, side: Side, numbers: HeadNumbers | None) -> tuple[F32, U8]:
        """What the codes are of, and the page's outliers as bytes."""
        n = self.n_outliers(x.shape[1])
        if n == 0:
            return x, np.empty(0, np.uint8)
        rest, taken = self.set_apart(x, side, numbers)
        places = np.flatnonzero(_in_run_order(taken, side))
        slots = np.zeros((2, n), "<u2")
        slots[0] = UNUSED
        slots[0, : len(places)] = places
        values = np.clip(x[_at(places, side)], -MOST_SCALE, MOST_SCALE)
        slots[1, : len(places)] = values.astype("<f2").view("<u2")
        return rest, slots.reshape(-1).view(np.uint8)

    def _page(self, runs: U8, arrays: list[Parameters], outliers: U8, n_bytes: int) -> U8:
        parts = [_pack(runs, self.bits)]
        for i in range(self.n_parameters if arrays and arrays[0] else 0):
            joined = np.concatenate([np.ravel(p[i]) for p in arrays])
            stored = np.clip(joined, -MOST_SCALE, MOST_SCALE).astype("<f2")
            parts.append(stored.view(np.uint8))
        page = np.zeros(n_bytes, np.uint8)
        used = np.concatenate([*parts, outliers])
        page[: len(used)] = used
        return page

    def _parts(self, page: U8, d: int, side: Side) -> tuple[U8, list[F32], U8]:
        """A page's codes as runs, its parameters, flat, and its outliers as bytes."""
        n_bytes = self.page_bytes(d, side)
        if page.shape != (n_bytes,):
            raise FormatError(
                f"{self.name}: a page of shape {page.shape}, where {n_bytes} bytes were expected"
            )
        n_codes, n = self._code_bytes(d, side), self._groups(d, side)
        runs = (d if side == "key" else padded(d)) * PAGE_TOKENS // RUN
        end = n_codes + 2 * n * self.n_parameters
        flat = np.ascontiguousarray(page[n_codes:end]).view("<f2").astype(np.float32)
        parameters = [flat[i * n : (i + 1) * n] for i in range(self.n_parameters)]
        outliers = np.ascontiguousarray(page[end : end + 4 * self.n_outliers(d)])
        return _unpack(page[:n_codes], self.bits, runs), parameters, outliers


@cache
def find(spec: str) -> BlockFormat:
    """The format of a type's name, with the options after a colon: `nuq3:outliers=1%`.

    Raises UnsupportedError: there is no such type; ConfigError: it has no such options.
    """
    name, colon, options = spec.partition(":")
    plain: BlockFormat = registry.find("formats", name, "cache type").FORMAT
    if not colon:
        return plain
    if not isinstance(plain, CodedFormat):
        raise ConfigError(f"cache type {name} takes no options, and '{options}' was given")
    return plain.with_options(options)


def half(x: npt.NDArray[Any]) -> F32:
    """Rounded to float16, kept as float32; larger values are clamped."""
    limited: F32 = np.clip(x, -MOST_SCALE, MOST_SCALE)
    return limited.astype(np.float16).astype(np.float32)


def _in_run_order(x: npt.NDArray[Any], side: Side) -> npt.NDArray[Any]:
    """[64, d] -> flat, in the order of a page's runs; padded channels of values are 0."""
    if side == "key":
        return x.T.reshape(-1)
    d = x.shape[1]
    filled = np.pad(x, ((0, 0), (0, padded(d) - d)))
    return filled.reshape(PAGE_TOKENS, -1, VALUE_CHANNELS).transpose(1, 0, 2).reshape(-1)


def _at(places: npt.NDArray[Any], side: Side) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Tokens and channels of places in run order."""
    if side == "key":
        return places % PAGE_TOKENS, places // PAGE_TOKENS
    block, inside = np.divmod(places, PAGE_TOKENS * VALUE_CHANNELS)
    return inside // VALUE_CHANNELS, block * VALUE_CHANNELS + inside % VALUE_CHANNELS


def _put(x: F32, side: Side, outliers: U8) -> F32:
    """x [64, d] with the outliers, as a page holds them, in their places."""
    places, values = outliers.view("<u2").reshape(2, -1)
    used = places != UNUSED
    x[_at(places[used].astype(np.int64), side)] = values[used].view("<f2")
    return x


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
