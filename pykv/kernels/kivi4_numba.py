"""kivi4 cache pages for the CPU: layout in formats/kivi4.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import bind, device, inlined
from pykv.kernels.quantize_numba import limits
from pykv.kernels.simd_codes import table_entry
from pykv.kernels.simd_memory import half_of, put_u8, scalar_f32

LEVELS, MOST_CODE = tuple(float(i) for i in range(16)), np.float32(15)
MOST = np.float32(65504)


def _quantize(x, step, n, codes, code_step, extra):
    """Codes from the rounded minimum by the rounded scale, halves rounded to even."""
    low, high = limits(x, step, n)
    m = half_of(max(min(low, MOST), -MOST))
    # of a group whose minimum was rounded up past its maximum the scale is negative
    s = half_of(max(min((high - m) / MOST_CODE, MOST), -MOST))
    for i in range(n):
        code = np.float32(0)
        if s != 0:
            code = max(min(np.rint((scalar_f32(x + i * step) - m) / s), MOST_CODE), np.float32(0))
        put_u8(codes + i * code_step, int(code))
    return s, m


def _level(x, extra):
    """The code itself."""
    return table_entry(x, LEVELS)


def functions(name: str, bits: int) -> tuple[Any, ...]:
    """The cache functions for codes of so many bits."""
    most = (1 << bits) - 1
    # the table's index has four bits, of which higher ones belong to other codes
    levels = tuple(float(i & most) for i in range(16))
    quantize = device(bind(_quantize, f"{name}_quantize", MOST_CODE=np.float32(most)))
    level = inlined(bind(_level, f"{name}_level", LEVELS=levels))
    return cache_functions(name, bits, quantize, level, "channel", "block", 2)


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = functions("kivi4", 4)
