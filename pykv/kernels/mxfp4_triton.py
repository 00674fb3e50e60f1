"""mxfp4 weights for the GPU: layout in formats/mxfp4.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.matvec_triton import byte_of, nibble

BLOCK_LEN, BLOCK_BYTES = 32, 17


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    exponent = byte_of(block, j * 0)
    # 2 ** (exponent - 128): the table's values are twice the type's
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return tl.load(table + nibble(block + 1, j)) * bits.to(tl.float32, bitcast=True)
