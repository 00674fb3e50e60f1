"""iq4_nl: 32 values in 18 bytes, 4.5 bits a value, from a table of 16 uneven steps.

Layout: d f16 | qs u8 [16];  v[j] = d * TABLE[qs[j] & 15],  v[j + 16] = d * TABLE[qs[j] >> 4].
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_iq4_nl; ggml-common.h, kvalues_iq4nl.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, BlockFormat, Blocks, bit_fields

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class IQ4_NL(BlockFormat):
    """Four bits into a table, and a scale."""

    layout = np.dtype([("d", "<f2", (1, 1)), ("qs", "u1", (16,))])

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 2, 16]."""
        steps = np.array(TABLE, np.float32)[bit_fields(blocks["qs"], 4)]
        return blocks["d"].astype(np.float32) * steps


FORMAT = IQ4_NL()
