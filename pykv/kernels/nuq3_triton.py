"""nuq3 cache pages for the GPU: layout in formats/nuq3.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 3, "range", "token", 2


@triton.jit
def level(code, extra):
    """The layer's level."""
    return tl.load(extra + code)
