"""fp8_e5m2 cache pages for the GPU: layout in formats/fp8_e5m2.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.fp8_e4m3_triton import fit, nearest_float8
from pykv.kernels.jit_triton import device

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 8, "head", "head", 0
__all__ = ["fit"]


@device
def level(code, extra):
    """The float8, the upper half of a float16."""
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """The nearest float8 of x / scale."""
    return nearest_float8(tl.div_rn(x, scale + tl.zeros_like(x)), 2, 15, 0x7B)
