"""q4_1: 32 values in 20 bytes, 5 bits a value.

Layout: d f16 | m f16 | qs u8 [16];  v[j] = d * (qs[j] & 15) + m,  v[j + 16] = d * (qs[j] >> 4) + m.
Source: llama.cpp ggml/src/ggml-quants.c, quantize_row_q4_1_ref, dequantize_row_q4_1.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, BlockFormat, Blocks, bit_fields, join_nibbles, reciprocal


class Q4_1(BlockFormat):
    """Four bits, a scale and a minimum."""

    layout = np.dtype([("d", "<f2", (1, 1)), ("m", "<f2", (1, 1)), ("qs", "u1", (16,))])

    def encode_blocks(self, x: F32) -> Blocks:
        """Codes count from the block's minimum, before that is rounded to half precision."""
        m = x.min(-1, keepdims=True)
        d = (x.max(-1, keepdims=True) - m) / 15
        q = np.minimum((x - m) * reciprocal(d) + np.float32(0.5), 15).astype(np.uint8)
        return self.pack(d=d, m=m, qs=join_nibbles(q))

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 2, 16]."""
        q = bit_fields(blocks["qs"], 4).astype(np.float32)
        return blocks["d"].astype(np.float32) * q + blocks["m"].astype(np.float32)


FORMAT = Q4_1()
