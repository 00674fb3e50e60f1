"""iq4_xs weights for the GPU: layout in formats/iq4_xs.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.matvec_triton import byte_of, half_of, nibble

BLOCK_LEN, BLOCK_BYTES = 256, 136


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    i = j // 32
    scale = byte_of(block + 4, i // 2) >> i % 2 * 4 & 15
    scale |= (byte_of(block + 2, i // 4) >> i % 4 * 2 & 3) << 4
    step = tl.load(table + nibble(block + 8 + i * 16, j % 32))
    return half_of(block, 0) * (scale - 32).to(tl.float32) * step
