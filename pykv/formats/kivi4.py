"""kivi4, kivi3, kivi2: asymmetric codes, keys by channel and values by token; b + 1 bits a value.

Page: codes of b bits, then scales f16, then minima f16; keys [32-token group][channel], values
[32-channel block][64 tokens].  v = s * code + m, m = f16(min), s = f16((max - m) / (2**b - 1)).
Error: at most s / 2 a value, and beyond m and m + (2**b - 1) * s the distance to them, which
is what rounding costs: |min| / 2048 (or 2**-25) and (max - m) / 2048 (or (2**b - 1) * 2**-25).
Source: Liu et al. 2024, KIVI, arXiv:2402.02750, section 3; github.com/jy-yuan/KIVI,
quant/new_pack.py. There a constant group divides by zero; here its codes are 0, which is exact
for what a float16 holds.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, U8
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters, half


class Kivi4(CodedFormat):
    """Four bits, a scale and a minimum."""

    bits, key_axis, value_axis, n_parameters, residual = 4, "channel", "block", 2, 64

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """Codes 0 to 2**bits - 1, halves rounded to even; 0 where the scale is 0."""
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        most = np.float32(2**self.bits - 1)
        m = half(low)
        # of a group whose minimum was rounded up past its maximum the scale is negative
        s = half((high - m) / most)
        ratio = np.divide(x - m, s, out=np.zeros_like(x), where=s != 0)
        return np.clip(np.rint(ratio), 0, most).astype(np.uint8), (s, m)

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """s * code + m."""
        s, m = parameters
        return s * codes.astype(np.float32) + m


FORMAT = Kivi4()
