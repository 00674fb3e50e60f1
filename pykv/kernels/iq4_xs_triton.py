"""iq4_xs weights for the GPU: layout in formats/iq4_xs.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of, short_of

BLOCK_LEN, BLOCK_BYTES, LANES = 256, 136, 16


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    scale = short_of(block, 4 + plane // 8 * 2) >> plane // 2 % 4 * 4 & 15
    scale |= (short_of(block, 2) >> plane // 2 * 2 & 3) << 4
    code = byte_of(block + (8 + plane // 2 * 16), lane) >> plane % 2 * 4 & 15
    return half_of(block, 0) * (scale - 32).to(tl.float32) * tl.load(table + code)
