"""bf16: the upper half of a single-precision number, little-endian, 2 bytes a value.

Rows round finite values from 3.396e38 to infinity, as ggml's do; pages hold the largest finite one.
Source: llama.cpp ggml/src/ggml-impl.h, ggml_compute_fp32_to_bf16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykv.formats.base import F32, FloatFormat


class Bfloat16(FloatFormat):
    """Eight bits of exponent, seven of mantissa."""

    layout = np.dtype("<u2")
    page_limit = 3.3895313892515355e38  # the largest finite value

    def narrow(self, x: F32) -> npt.NDArray[Any]:
        """f32 -> bf16, to nearest even; a NaN becomes a quiet one, so that rounding keeps it."""
        bits = np.ascontiguousarray(x).view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        rounded = bits + np.uint32(0x7FFF) + odd
        kept = np.where(np.isnan(x), bits | np.uint32(0x400000), rounded)
        return (kept >> np.uint32(16)).astype(self.layout)

    def widen(self, stored: npt.NDArray[Any]) -> F32:
        """bf16 -> f32."""
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


FORMAT = Bfloat16()
