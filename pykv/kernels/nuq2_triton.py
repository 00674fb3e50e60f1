"""nuq2 cache pages for the GPU: layout in formats/nuq2.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 2, "range", "token", 2


@triton.jit
def level(code, extra):
    """The layer's level."""
    return tl.load(extra + code)
