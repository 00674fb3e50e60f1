"""tq3 cache pages for the GPU: as tq4_triton.py, with codes of 3 bits."""

from __future__ import annotations

from pykv.formats import tq3
from pykv.kernels.tq4_triton import LENGTHS, code, fit, level

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 3, "token", "token", 1
LEVELS = tq3.FORMAT.levels  # for `extra`
__all__ = ["LENGTHS", "code", "fit", "level"]
