"""fp8_e4m3, fp8_e5m2: eight-bit floating point, one scale per layer and KV head; 8 bits a value.

Page: one byte a value, and nothing else;  v = scale * float8(code).  The scale is 1, or of a
calibration file. e4m3 is the "fn" kind: 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no
infinity, largest value 448. e5m2: bias 15, largest finite value 57,344.
Error: relative 2**-4 (e4m3) or 2**-3 (e5m2), and below the normal range scale * 2**-10 or scale *
2**-17; what lies beyond the largest value is stored as it, and never as infinity or NaN. Codes past
that of the largest value read as NaN: an unwritten page shows.
Source: Micikevicius et al. 2022, FP8 formats for deep learning, arXiv:2209.05433, section 3.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pykv.formats.base import F32, U8
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters


class E4M3(CodedFormat):
    """Four exponent and three mantissa bits."""

    bits, key_axis, value_axis, n_parameters, calibration = 8, "head", "head", 0, "scale"
    mantissa_bits: ClassVar[int] = 3
    bias: ClassVar[int] = 7
    largest: ClassVar[int] = 0x7E  # the code of the largest finite value

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """The nearest float8 of x / scale, of two the even one."""
        y = x if numbers is None or numbers.scale is None else x / numbers.scale
        size = np.abs(y)
        least = 1 - self.bias
        exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, least), least)
        # units of the last mantissa bit; the carry into the exponent comes by itself
        units = np.rint(np.ldexp(size, self.mantissa_bits - exponent))
        base = (exponent + self.bias - 1).astype(np.float32) * np.float32(2**self.mantissa_bits)
        codes = np.minimum(base + units, self.largest).astype(np.uint8)
        return codes | np.where(np.signbit(y), np.uint8(128), np.uint8(0)), ()

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """scale * the code's value."""
        size = codes & np.uint8(127)
        exponent = np.maximum(size >> np.uint8(self.mantissa_bits), np.uint8(1))
        # below the first exponent the mantissa has no leading one
        units = size.astype(np.int32) - (exponent.astype(np.int32) - 1) * 2**self.mantissa_bits
        power = exponent.astype(np.int32) - self.bias - self.mantissa_bits
        magnitude: F32 = np.ldexp(units.astype(np.float32), power).astype(np.float32)
        magnitude[size > self.largest] = np.nan
        value: F32 = np.where(codes > 127, -magnitude, magnitude)
        return value if numbers is None or numbers.scale is None else value * numbers.scale


FORMAT = E4M3()
