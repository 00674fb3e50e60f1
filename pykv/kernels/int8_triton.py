"""int8 cache pages for the GPU: layout in formats/coded.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 8, "token", "token", 1


@triton.jit
def level(code, extra):
    """The code as a signed byte."""
    return ((code ^ 128) - 128).to(tl.float32)
