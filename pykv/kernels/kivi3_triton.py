"""kivi3 cache pages for the GPU: as kivi4_triton.py, with codes of 3 bits."""

from __future__ import annotations

from pykv.kernels.kivi4_triton import code, fit, level

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 3, "channel", "block", 2
__all__ = ["code", "fit", "level"]
