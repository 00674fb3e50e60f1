"""f16: IEEE half precision, little-endian, 2 bytes a value.

Rows overflow to infinity from 65,520, as ggml's do; pages hold 65,504 for any larger finite value.
Source: llama.cpp ggml/src/ggml-impl.h, ggml_compute_fp32_to_fp16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykv.formats.base import F32, FloatFormat


class Half(FloatFormat):
    """IEEE half precision."""

    layout = np.dtype("<f2")
    page_limit = 65504.0

    def narrow(self, x: F32) -> npt.NDArray[Any]:
        """f32 -> f16, to nearest even."""
        return x.astype(self.layout)

    def widen(self, stored: npt.NDArray[Any]) -> F32:
        """f16 -> f32."""
        return stored.astype(np.float32)


FORMAT = Half()
