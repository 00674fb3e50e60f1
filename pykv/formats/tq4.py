"""tq4, tq3: a rotated head's direction in uneven steps, and its length; b + 16 / d bits a value.

Page: codes of b bits, then scales f16 [64 tokens].  A head's vector is turned by a random
orthogonal matrix (the transform `random`), so that its channels look normally distributed; its
code i stands for scale * LEVELS[i].  The levels are the Lloyd-Max quantiser's for a normal
distribution. The scale makes the decoded vector as long as the encoded one.
Error: a vector of values up to 30,000 keeps its length, to 2**-11 (or 2**-25 times that of its
levels), and errs by at most sqrt(2) of it; a turned one by a mean square of about 0.0095 (4 bits)
or 0.0345 (3 bits) of its own.
Source: Zandieh et al. 2025, TurboQuant, arXiv:2504.19874, section 3 (the mean-square variant);
J. Max 1960, Quantizing for minimum distortion, table I, for the levels.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pykv.formats.base import F32, U8
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters

UPPER = (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326)


def mirrored(upper: tuple[float, ...]) -> tuple[float, ...]:
    """All levels, from those above zero."""
    return tuple(-x for x in reversed(upper)) + upper


def _length(x: F32) -> npt.NDArray[np.float64]:
    """f32 [..., n] -> f64 [..., 1], the squares summed one after the other."""
    return np.sqrt(np.cumsum(x.astype(np.float64) ** 2, axis=-1)[..., -1:])


class Tq4(CodedFormat):
    """Four bits into normal quantiser levels, and a length."""

    bits, key_axis, value_axis, residual, transform = 4, "token", "token", 64, "random"
    levels: ClassVar[tuple[float, ...]] = mirrored(UPPER)

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """The nearest level of x * sqrt(n) / |x|, the upper one of two; lengths in float64."""
        levels = np.array(self.levels, np.float32)
        length = _length(x)
        unit = np.divide(np.sqrt(x.shape[-1]), length, out=np.zeros_like(length), where=length > 0)
        # a length below 1e-38 has an inverse that float32 does not hold
        unit = np.minimum(unit, np.finfo(np.float32).max).astype(np.float32)
        middles = (levels[:-1] + levels[1:]) / 2
        codes = np.searchsorted(middles, x * unit, side="right")
        return codes.astype(np.uint8), ((length / _length(levels[codes])).astype(np.float32),)

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """scale * LEVELS[code]."""
        return parameters[0] * np.array(self.levels, np.float32)[codes]


FORMAT = Tq4()
