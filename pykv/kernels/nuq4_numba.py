"""nuq4 cache pages for the CPU: layout in formats/nuq4.py.

Levels and the ranges of key channels are those of a calibration file: see coded_pages_numba.py for
where they lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.coded_pages_numba import RANGES_AT
from pykv.kernels.jit_numba import bind, device, inlined
from pykv.kernels.quantize_numba import limits
from pykv.kernels.simd_codes import vector_entry
from pykv.kernels.simd_memory import half_of, load_f32, put_u8, scalar_f32

LEVELS = 16
f = np.float32
MOST = np.float32(65504)


@inlined
def level(x, extra):
    """The level of the code."""
    return vector_entry(load_f32(extra), x)


@device
def nearest(ratio, extra, n_levels):
    """The code of the level nearest to `ratio`, of two the upper one."""
    code = 0
    for k in range(n_levels - 1):
        middle = (scalar_f32(extra + k * 4) + scalar_f32(extra + k * 4 + 4)) / f(2)
        code += ratio >= middle
    return code


def _quantize_keys(x, step, n, codes, code_step, extra):
    """Codes in the channels' own ranges."""
    for i in range(n):
        scale = scalar_f32(extra + RANGES_AT + i * 4)
        centre = scalar_f32(extra + RANGES_AT + (n + i) * 4)
        ratio = f(0)
        if scale != 0:
            ratio = (scalar_f32(x + i * step) - centre) / scale
        put_u8(codes + i * code_step, nearest(ratio, extra, LEVELS))
    return f(0), f(0)


def _quantize_values(x, step, n, codes, code_step, extra):
    """Codes in the token's range, which is returned."""
    low, high = limits(x, step, n)
    centre = half_of(max(min(low / f(2) + high / f(2), MOST), -MOST))
    scale = half_of(max(min(max(high - centre, centre - low), MOST), -MOST))
    for i in range(n):
        ratio = f(0)
        if scale != 0:
            ratio = (scalar_f32(x + i * step) - centre) / scale
        put_u8(codes + i * code_step, nearest(ratio, extra, LEVELS))
    return scale, centre


def functions(name: str, bits: int) -> tuple[Any, ...]:
    """The cache functions for codes of so many bits."""
    keys = device(bind(_quantize_keys, f"{name}_quantize_keys", LEVELS=2**bits))
    values = device(bind(_quantize_values, f"{name}_quantize_values", LEVELS=2**bits))
    return cache_functions(
        name, bits, keys, level, "range", "token", 2, quantize_value=values, outliers=True
    )


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = functions("nuq4", 4)
