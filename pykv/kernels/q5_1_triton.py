"""q5_1 cache pages for the GPU: layout in formats/coded.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 2


@triton.jit
def level(code, extra):
    """The code."""
    return code.to(tl.float32)
