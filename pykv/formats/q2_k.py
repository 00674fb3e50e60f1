"""q2_k: 256 values in 84 bytes, 2.625 bits a value.

Layout: scales u8 [16] | qs u8 [2][32] | d f16 | dmin f16. The values are 16 runs of 16;
v[r][j] = d * (scales[r] & 15) * q[r][j] - dmin * (scales[r] >> 4). Codes: for each half of 128
values, bits 0-1 of the 32 bytes are its first 32 values, bits 2-3 the next, and so on.
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_q2_K.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, BlockFormat, Blocks, bit_fields


class Q2_K(BlockFormat):
    """Two bits, scales and minima in two levels."""

    block_len = 256
    layout = np.dtype(
        [
            ("scales", "u1", (16, 1)),
            ("qs", "u1", (2, 32)),
            ("d", "<f2", (1, 1)),
            ("m", "<f2", (1, 1)),
        ]
    )

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 16, 16]."""
        scales = blocks["scales"]
        d = blocks["d"].astype(np.float32) * (scales & 15).astype(np.float32)
        m = blocks["m"].astype(np.float32) * (scales >> 4).astype(np.float32)
        q = bit_fields(blocks["qs"], 2).reshape(*blocks.shape, 16, 16)
        return d * q.astype(np.float32) - m


FORMAT = Q2_K()
