"""f32 pages and weights for the GPU; the tiles of pages are in plain_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 32, "plain", "plain", 0
level = tl.float32
BLOCK_LEN, BLOCK_BYTES = 32, 128  # a row has no blocks; this is what a thread block steps by


@triton.jit
def weight(block, j, table):
    """Value j of 32 at that address; see matvec_triton.py."""
    return tl.load(block.to(tl.pointer_type(tl.float32)) + j).to(tl.float32)
