"""q4_1: 32 values in 20 bytes, 5 bits a value.

Layout: d f16 | m f16 | qs u8 [16];  v[j] = d * (qs[j] & 15) + m,  v[j + 16] = d * (qs[j] >> 4) + m.
Page: codes of 4 bits, then scales f16, then minima f16, each [32-channel block][64 tokens].
Error: at most (max - min) / 30 a value, and what rounding costs: (max - min) / 2048 (or
15 * 2**-25) for d and |min| / 2048 (or 2**-25) for m.
Source: llama.cpp ggml/src/ggml-quants.c, quantize_row_q4_1_ref, dequantize_row_q4_1.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, U8, Blocks, bit_fields, join_nibbles, reciprocal
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters


class Q4_1(CodedFormat):
    """Four bits, a scale and a minimum."""

    roles = ("weight", "cache")
    bits, residual, transform, n_parameters = 4, 64, "hadamard", 2
    layout = np.dtype([("d", "<f2", (1, 1)), ("m", "<f2", (1, 1)), ("qs", "u1", (16,))])

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """Codes count from the block's minimum, before that is rounded to half precision."""
        m = x.min(-1, keepdims=True)
        d = (x.max(-1, keepdims=True) - m) / 15
        q = np.minimum((x - m) * reciprocal(d) + np.float32(0.5), 15).astype(np.uint8)
        return q, (d, m)

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """d * code + m."""
        d, m = parameters
        return d * codes.astype(np.float32) + m

    def encode_blocks(self, x: F32) -> Blocks:
        """F32 [..., N, 32] -> layout [..., N]."""
        q, (d, m) = self.quantize(x)
        return self.pack(d=d, m=m, qs=join_nibbles(q))

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 2, 16]."""
        q = bit_fields(blocks["qs"], 4).astype(np.float32)
        return blocks["d"].astype(np.float32) * q + blocks["m"].astype(np.float32)


FORMAT = Q4_1()
