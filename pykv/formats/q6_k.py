"""q6_k: 256 values in 210 bytes, 6.5625 bits a value.

Layout: ql u8 [2][64] | qh u8 [2][32] | scales i8 [16] | d f16. The values are 16 runs of 16;
v[r][j] = d * scales[r] * (q - 32). For each half of 128 values, the low four bits of the first 64
are the low nibbles of ql, those of the other 64 the high ones; bits 4-5 of the four runs of 32 are
bits 0-1, 2-3, 4-5 and 6-7 of qh.
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_q6_K.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, BlockFormat, Blocks, bit_fields


class Q6_K(BlockFormat):
    """Six bits around zero, scales in two levels."""

    block_len = 256
    layout = np.dtype(
        [
            ("ql", "u1", (2, 64)),
            ("qh", "u1", (2, 32)),
            ("scales", "i1", (16, 1)),
            ("d", "<f2", (1, 1)),
        ]
    )

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 16, 16]."""
        runs = (*blocks.shape, 16, 16)
        low, high = bit_fields(blocks["ql"], 4), bit_fields(blocks["qh"], 2)
        q: F32 = (low.reshape(runs) | high.reshape(runs) << np.uint8(4)).astype(np.float32) - 32
        return blocks["d"].astype(np.float32) * blocks["scales"].astype(np.float32) * q


FORMAT = Q6_K()
