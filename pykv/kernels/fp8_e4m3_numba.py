"""fp8_e4m3 cache pages for the CPU: layout in formats/fp8_e4m3.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import bind, device, inlined
from pykv.kernels.simd import splat
from pykv.kernels.simd_codes import widen_e4m3
from pykv.kernels.simd_memory import float_bits, put_u8, scalar_f32

MANTISSA = BIAS = LARGEST = 1
f = np.float32
TWO_TO_8 = np.float32(256)


def _quantize(x, step, n, codes, code_step, extra):
    """Nearest float8 of x / scale, of two the even one; too large ones become the largest."""
    scale = scalar_f32(extra)
    for i in range(n):
        bits = float_bits(scalar_f32(x + i * step) / scale)
        sign, size = bits >> 31 & 1, bits & 0x7FFFFFFF
        exponent = (size >> 23) - 127
        mantissa = size & 0x7FFFFF | 0x800000  # in units of 2 ** (exponent - 23)
        # bits that fall off: more of them below the smallest normal number
        drop = 23 - MANTISSA + max(1 - BIAS - exponent, 0)
        code = 0
        if drop < 26:
            kept, rest = mantissa >> drop, mantissa & ((1 << drop) - 1)
            half = 1 << (drop - 1)
            kept += rest > half or (rest == half and kept & 1 == 1)
            code = min(max(exponent + BIAS - 1, 0) * (1 << MANTISSA) + kept, LARGEST)
        put_u8(codes + i * code_step, code | sign << 7)
    return f(0), f(0)


@inlined
def load_level(address, extra):
    """Sixteen float8."""
    return widen_e4m3(address) * splat(TWO_TO_8)


def functions(name: str, mantissa: int, bias: int, largest: int, level: Any) -> tuple[Any, ...]:
    """The cache functions of a float8 type."""
    quantize = bind(_quantize, f"{name}_quantize", MANTISSA=mantissa, BIAS=bias, LARGEST=largest)
    return cache_functions(name, 8, device(quantize), level, "head", "head", 0)


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = functions(
    "fp8_e4m3", 3, 7, 0x7E, load_level
)
