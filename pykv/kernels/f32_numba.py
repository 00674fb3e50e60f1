"""f32 weights and cache pages for the CPU: layout in formats/f32.py."""

from __future__ import annotations

import numpy as np

from pykv.kernels import plain_numba
from pykv.kernels.jit_numba import device
from pykv.kernels.simd_memory import (
    load_f32,
    put_f32,
    store_f32,
)

BLOCK_LEN, BLOCK_BYTES = 32, 128
LIMIT = np.float32(3.4028234663852886e38)  # the largest finite value


@device
def unpack(block, part):
    """32 weights, in order, as two vectors."""
    return load_f32(block), load_f32(block + 64)


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
) = plain_numba.cache_functions("f32", 4, load_f32, store_f32, put_f32)
