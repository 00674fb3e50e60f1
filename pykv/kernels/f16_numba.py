"""f16 weights and cache pages for the CPU: layout in formats/f16.py."""

from __future__ import annotations

import numpy as np

from pykv.kernels import plain_numba
from pykv.kernels.jit_numba import device
from pykv.kernels.simd_memory import (
    load_f16,
    put_f16,
    store_f16,
)

BLOCK_LEN, BLOCK_BYTES = 32, 64
LIMIT = np.float32(65504)  # the largest finite value


@device
def unpack(block, part):
    """32 weights, in order, as two vectors."""
    return load_f16(block), load_f16(block + 32)


(
    encode_keys,
    encode_values,
    scores,
    mix,
    read_keys,
    read_values,
    write_key,
    write_value,
    scores_read,
) = plain_numba.cache_functions("f16", 2, load_f16, store_f16, put_f16)
