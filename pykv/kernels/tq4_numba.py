"""tq4 cache pages for the CPU: layout in formats/tq4.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from pykv.formats import tq4
from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import bind, device, inlined
from pykv.kernels.simd_codes import table_entry
from pykv.kernels.simd_memory import put_u8, scalar_f32

MIDDLES = LEVELS = (np.float32(0),)
ZERO, MOST = np.float32(0), np.float64(np.finfo(np.float32).max)


def _quantize(x, step, n, codes, code_step, extra):
    """Nearest levels, and the scale that keeps the length; lengths in float64."""
    total = 0.0
    for i in range(n):
        v = np.float64(scalar_f32(x + i * step))
        total += v * v
    length = np.sqrt(total)
    # a length below 1e-38 has an inverse that float32 does not hold
    unit = np.float32(min(np.sqrt(np.float64(n)) / length, MOST)) if length > 0 else ZERO
    decoded = 0.0
    for i in range(n):
        scaled, code = scalar_f32(x + i * step) * unit, 0
        for middle in MIDDLES:
            code += scaled >= middle
        put_u8(codes + i * code_step, code)
        entry = np.float64(LEVELS[code])
        decoded += entry * entry
    return np.float32(length / np.sqrt(decoded)), ZERO


def _level(x, extra):
    """The code's level."""
    return table_entry(x, LEVELS)


def functions(name: str, bits: int, levels: tuple[float, ...]) -> tuple[Any, ...]:
    """The cache functions for codes into these levels."""
    entries = tuple(np.float32(v) for v in levels)
    middles = tuple((a + b) / np.float32(2) for a, b in pairwise(entries))
    quantize = device(bind(_quantize, f"{name}_quantize", MIDDLES=middles, LEVELS=entries))
    # the table's index has four bits, of which higher ones belong to other codes
    level = inlined(bind(_level, f"{name}_level", LEVELS=entries * (16 // len(entries))))
    return cache_functions(name, bits, quantize, level, "token", "token")


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = functions(
    "tq4", 4, tq4.FORMAT.levels
)
