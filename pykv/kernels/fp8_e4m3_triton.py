"""fp8_e4m3 cache pages for the GPU: layout in formats/fp8_e4m3.py."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 8, "head", "head", 0


@triton.jit
def level(code, extra):
    """The float8; its bits are moved into those of a float16, 256 times smaller."""
    return ((code & 127) << 7 | (code & 128) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(
        tl.float32
    ) * 256.0
