"""fp8_e5m2 cache pages for the CPU: layout in formats/fp8_e4m3.py."""

from __future__ import annotations

from pykv.kernels.fp8_e4m3_numba import functions
from pykv.kernels.jit_numba import inlined
from pykv.kernels.simd_codes import widen_e5m2


@inlined
def load_level(address, extra):
    """Sixteen float8."""
    return widen_e5m2(address)


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = functions(
    "fp8_e5m2", 2, 15, 0x7B, load_level
)
