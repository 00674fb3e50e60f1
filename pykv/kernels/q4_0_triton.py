"""q4_0 cache pages for the GPU: layout in formats/coded.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "block", "block", 1


@triton.jit
def level(code, extra):
    """The code less 8."""
    return code.to(tl.float32) - 8.0
