"""int8 cache pages for the CPU: layout in formats/int8.py."""

from __future__ import annotations

import numpy as np

from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.quantize_numba import extreme
from pykv.kernels.simd import to_f32
from pykv.kernels.simd_memory import half_of, load_i8, put_u8, scalar_f32

F127, MOST = np.float32(127), np.float32(65504)


@device
def quantize(x, step, n, codes, code_step, extra):
    """Signed bytes by the rounded scale, halves rounded to even."""
    s = half_of(min(abs(extreme(x, step, n)) / F127, MOST))
    for i in range(n):
        code = np.float32(0)
        if s > 0:
            code = max(min(np.rint(scalar_f32(x + i * step) / s), F127), -F127)
        put_u8(codes + i * code_step, int(code))
    return s, s


@inlined
def load_level(address, extra):
    """Sixteen signed bytes."""
    return to_f32(load_i8(address))


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = cache_functions(
    "int8", 8, quantize, load_level, "token", "token"
)
