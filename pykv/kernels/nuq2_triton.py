"""nuq2 cache pages for the GPU: as nuq4_triton.py, with codes of 2 bits."""

from __future__ import annotations

from pykv.kernels.nuq4_triton import code, fit, level

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 2, "range", "token", 2
__all__ = ["code", "fit", "level"]
