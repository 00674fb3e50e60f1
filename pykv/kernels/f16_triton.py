"""f16 pages and weights for the GPU; the tiles of pages are in plain_triton.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 16, "plain", "plain", 0
level = tl.float16
BLOCK_LEN, BLOCK_BYTES, LANES = 1, 2, 1  # of rows, which have no blocks


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    return tl.load(block.to(tl.pointer_type(tl.float16)) + lane).to(tl.float32)
