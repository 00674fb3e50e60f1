"""mxfp4 weights for the GPU: layout in formats/mxfp4.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of

BLOCK_LEN, BLOCK_BYTES, LANES = 32, 17, 16


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    exponent = byte_of(block, 0)
    # 2 ** (exponent - 128): the table's values are twice the type's
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    step = tl.load(table + (byte_of(block + 1, lane) >> plane * 4 & 15))
    return step * bits.to(tl.float32, bitcast=True)
