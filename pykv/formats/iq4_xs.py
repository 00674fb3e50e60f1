"""iq4_xs: 256 values in 136 bytes, 4.25 bits a value: iq4_nl's table, a 6-bit scale for each 32.

Layout: d f16 | scales_h u16 | scales_l u8 [4] | qs u8 [8][16];
v[p][j] = d * (s[p] - 32) * TABLE[q[p][j]], where q[p] are the low nibbles of qs[p], then the high
ones, and s[p] has its low four bits in nibble p of scales_l and its high two in bits 2p and 2p + 1
of scales_h.
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_iq4_xs.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, BlockFormat, Blocks, bit_fields
from pykv.formats.iq4_nl import TABLE


class IQ4_XS(BlockFormat):
    """Four bits into a table, and scales in two levels."""

    block_len = 256
    layout = np.dtype(
        [
            ("d", "<f2", (1,)),
            ("scales_h", "<u2", (1,)),
            ("scales_l", "u1", (4,)),
            ("qs", "u1", (8, 16)),
        ]
    )

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 8, 2, 16]."""
        low = bit_fields(blocks["scales_l"][..., None], 4).reshape(*blocks.shape, 8)
        high = blocks["scales_h"] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
        scales = (low | high << np.uint16(4)).astype(np.float32) - 32
        d = blocks["d"].astype(np.float32) * scales
        return d[..., None, None] * np.array(TABLE, np.float32)[bit_fields(blocks["qs"], 4)]


FORMAT = IQ4_XS()
