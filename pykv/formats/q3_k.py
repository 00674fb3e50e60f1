"""q3_k: 256 values in 110 bytes, 3.4375 bits a value.

Layout: hmask u8 [32] | qs u8 [2][32] | scales u8 [12] | d f16. The values are 16 runs of 16;
v[r][j] = d * (s[r] - 32) * (q - 4). Bits 0-1 of q lie as in q2_k; bit 2 of value 32 p + i is bit p
of hmask[i]. Scales of six bits: s[r] has its low four in nibble r / 8 of scales[r % 8], its high
two in bits 2 (r / 4) and 2 (r / 4) + 1 of scales[8 + r % 4].
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_q3_K.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, BlockFormat, Blocks, bit_fields


class Q3_K(BlockFormat):
    """Three bits around zero, scales in two levels."""

    block_len = 256
    layout = np.dtype(
        [
            ("hmask", "u1", (32,)),
            ("qs", "u1", (2, 32)),
            ("scales", "u1", (12,)),
            ("d", "<f2", (1, 1)),
        ]
    )

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 16, 16]."""
        runs = (*blocks.shape, 16, 16)
        low = bit_fields(blocks["scales"][..., :8], 4).reshape(*blocks.shape, 16, 1)
        high = bit_fields(blocks["scales"][..., 8:], 2).reshape(*blocks.shape, 16, 1)
        scales = (low | high << np.uint8(4)).astype(np.float32) - 32
        low = bit_fields(blocks["qs"], 2).reshape(runs)
        high = bit_fields(blocks["hmask"], 1).reshape(runs)
        q = (low | high << np.uint8(2)).astype(np.float32) - 4
        return blocks["d"].astype(np.float32) * scales * q


FORMAT = Q3_K()
