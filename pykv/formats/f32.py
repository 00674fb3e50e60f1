"""f32: IEEE single precision, little-endian, 4 bytes a value.

Source: llama.cpp ggml/include/ggml.h, GGML_TYPE_F32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykv.formats.base import F32, FloatFormat


class Single(FloatFormat):
    """IEEE single precision."""

    layout = np.dtype("<f4")

    def narrow(self, x: F32) -> npt.NDArray[Any]:
        """The values themselves."""
        return x.astype(self.layout, copy=False)

    def widen(self, stored: npt.NDArray[Any]) -> F32:
        """The values themselves, a view where the machine is little-endian."""
        return stored.astype(np.float32, copy=False)


FORMAT = Single()
