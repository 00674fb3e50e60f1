"""fp8_e5m2 cache pages for the GPU: layout in formats/fp8_e5m2.py."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 8, "head", "head", 0


@triton.jit
def level(code, extra):
    """The float8, the upper half of a float16."""
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
