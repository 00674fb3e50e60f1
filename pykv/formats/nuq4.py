"""nuq4, nuq3, nuq2: uneven levels from a calibration text; keys by channel, values by token.

Page: codes of b bits; in a value page scales f16 [64 tokens], then centres f16 [64 tokens]; then,
with the option `outliers=P%`, ceil(P / 100 * 64 * d) outliers.  v = scale * LEVELS[code] + centre.
A layer's keys and its values have 2**b levels each, rising within -1 to 1, from a calibration file.
Keys are encoded before RoPE; their scale and centre, half the width of a channel's range and its
middle, belong to the layer, head and channel and come from that file too. A token's values have the
range of their own least and largest: centre = f16((min + max) / 2), scale = f16(max(max - centre,
centre - min)). The code is that of the level nearest to (x - centre) / scale, of two the upper one.
Outliers are values of the page outside their ranges, the farthest first. A key's range is its
channel's. For values it is, for this choice alone, what is left of a token without its ceil(P / 200
* d) least and as many largest; the page's range is then that of all that were not chosen.
Error: in its range a value errs by scale times half the widest gap between levels, or times the
distance of the last level to the range's end; outside it by the distance to that level. Rounding
adds (|centre| + scale) / 2048, and at most 2**-24. An outlier errs by |x| / 2048 or 2**-25.
Source: Hooper et al. 2024, KVQuant, arXiv:2401.18079, section 3; github.com/SqueezeAILab/KVQuant,
quant/kvquant/simquant_module_quantizer.py. There outliers of a key are as many as lie outside its
range, in a sparse matrix; here a page has a fixed number. engine/calibrate.py says how levels and
ranges are found, and how that differs.
"""

from __future__ import annotations

import copy
import math
import re
from fractions import Fraction
from typing import NoReturn

import numpy as np

from pykv.errors import ConfigError, FormatError
from pykv.formats.base import F32, U8, Side
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters, half

MOST_OUTLIERS = 25  # percent
_OUTLIERS = re.compile(r"outliers=([0-9]{1,3}(?:\.[0-9]{1,6})?)%")


class Nuq4(CodedFormat):
    """Four bits into levels of the layer."""

    bits, key_axis, value_axis, n_parameters, residual = 4, "head", "token", 2, 64
    calibration, key_position = "levels", "read"

    @property
    def name(self) -> str:
        """The registry's key, and the options as they are written."""
        stem = super().name
        return f"{stem}:outliers={float(self.outliers):g}%" if self.outliers else stem

    def with_options(self, options: str) -> CodedFormat:
        """The format that keeps outliers.  Raises ConfigError: another option, or too many."""
        match = _OUTLIERS.fullmatch(options)
        share = Fraction(match[1]) if match else Fraction(-1)
        if not 0 <= share <= MOST_OUTLIERS:
            raise ConfigError(
                f"cache type {super().name}: '{options}' is no option of it; it takes "
                f"outliers=1%, from 0 to {MOST_OUTLIERS} percent"
            )
        made = copy.copy(self)
        made.outliers = share
        return made

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """The nearest level's code; where the range has no width, that of the level nearest to 0.

        Raises FormatError: there are no levels.
        """
        levels = self._levels(self._known(numbers))
        ratio, parameters = self.within(x, numbers)
        middles = (levels[:-1] + levels[1:]) / 2
        codes = np.searchsorted(middles, ratio, side="right").astype(np.uint8)
        return codes, () if self._given(numbers) else parameters

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """scale * LEVELS[code] + centre.  Raises FormatError: there are no levels."""
        levels = self._levels(self._known(numbers))
        scale, centre = self._given(numbers) or parameters
        value: F32 = scale * levels[codes] + centre
        return value

    def within(self, x: F32, numbers: HeadNumbers | None) -> tuple[F32, Parameters]:
        """(x - centre) / scale, and both; 0 where the range has no width."""
        given = self._given(numbers)
        if given:
            scale, centre = given
        else:
            low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
            centre = half(low / 2 + high / 2)
            scale = half(np.maximum(high - centre, centre - low))
        ratio = np.divide(x - centre, scale, out=np.zeros_like(x), where=scale != 0)
        return ratio, (scale, centre)

    def beyond(self, x: F32, side: Side, numbers: HeadNumbers | None) -> F32:
        """Distances to the ranges' nearer ends; negative inside."""
        if side == "key":
            scale, centre = self._given(self._known(numbers)) or self._no_ranges()
            distance: F32 = np.abs(x - centre) - scale
            return distance
        d = x.shape[1]
        # one value is left at least
        n = self.n_ends(d)
        ordered = np.sort(x, -1)
        outside: F32 = np.maximum(x - ordered[:, d - 1 - n, None], ordered[:, n, None] - x)
        return outside

    def n_ends(self, d: int) -> int:
        """Values at each end of a token that may be outliers."""
        return min(math.ceil(self.outliers / 200 * d), (d - 1) // 2)

    def _known(self, numbers: HeadNumbers | None) -> HeadNumbers:
        if numbers is None:
            raise FormatError(
                f"{self.name}: its levels and ranges come from a calibration file, and none was "
                "given; `pykv calibrate` writes one"
            )
        return numbers

    def _no_ranges(self) -> NoReturn:
        raise FormatError(f"{self.name}: a head's keys need the ranges of its channels")

    @staticmethod
    def _given(numbers: HeadNumbers | None) -> Parameters:
        """Scale and centre of a head's channels; nothing where each token has its own."""
        if numbers is None or numbers.scale is None or numbers.centre is None:
            return ()
        return np.asarray(numbers.scale), np.asarray(numbers.centre)

    def _levels(self, numbers: HeadNumbers) -> F32:
        levels = numbers.levels
        if levels is None or levels.shape != (2**self.bits,):
            found = "none" if levels is None else f"an array of shape {levels.shape}"
            raise FormatError(f"{self.name}: expected {2**self.bits} levels, not {found}")
        return levels


FORMAT = Nuq4()
