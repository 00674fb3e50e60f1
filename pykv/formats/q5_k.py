"""q5_k: 256 values in 176 bytes, 5.5 bits a value.

Layout: d f16 | dmin f16 | scales u8 [12] | qh u8 [32] | qs u8 [4][32]. As q4_k, with a fifth bit:
bit 4 of value 32 p + i is bit p of qh[i].
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_q5_K.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, BlockFormat, Blocks, bit_fields
from pykv.formats.q4_k import scales_and_minima


class Q5_K(BlockFormat):
    """Five bits, scales and minima in two levels."""

    block_len = 256
    layout = np.dtype(
        [
            ("d", "<f2", (1, 1)),
            ("m", "<f2", (1, 1)),
            ("scales", "u1", (12,)),
            ("qh", "u1", (32,)),
            ("qs", "u1", (4, 32)),
        ]
    )

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 8, 32]."""
        s, m = scales_and_minima(blocks["scales"])
        low = bit_fields(blocks["qs"], 4).reshape(*blocks.shape, 8, 32)
        q = (low | bit_fields(blocks["qh"], 1) << np.uint8(4)).astype(np.float32)
        return blocks["d"].astype(np.float32) * s * q - blocks["m"].astype(np.float32) * m


FORMAT = Q5_K()
