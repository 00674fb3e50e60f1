"""bf16 weights and cache pages for the CPU: layout in formats/bf16.py."""

from __future__ import annotations

import numpy as np

from pykv.kernels import plain_numba
from pykv.kernels.jit_numba import device
from pykv.kernels.simd_memory import (
    load_bf16,
    put_bf16,
    store_bf16,
)

BLOCK_LEN, BLOCK_BYTES = 32, 64
LIMIT = np.float32(3.3895313892515355e38)  # the largest finite value


@device
def unpack(block, part):
    """32 weights, in order, as two vectors."""
    return load_bf16(block), load_bf16(block + 32)


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
) = plain_numba.cache_functions("bf16", 2, load_bf16, store_bf16, put_bf16)
