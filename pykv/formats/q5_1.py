"""q5_1: 32 values in 24 bytes, 6 bits a value.

Layout: d f16 | m f16 | qh u8 [4] | qs u8 [16];  v[j] = d * q[j] + m, with q as in q5_0.
Page: codes of 5 bits, then scales f16, then minima f16, each [32-channel block][64 tokens].
Error: at most (max - min) / 62 a value, and what rounding costs: (max - min) / 2048 (or
31 * 2**-25) for d and |min| / 2048 (or 2**-25) for m.
Source: llama.cpp ggml/src/ggml-quants.c, quantize_row_q5_1_ref, dequantize_row_q5_1.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, U8, Blocks, reciprocal
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters
from pykv.formats.q5_0 import join_fifth, split_fifth


class Q5_1(CodedFormat):
    """Five bits, a scale and a minimum."""

    roles = ("weight", "cache")
    bits, residual, transform, n_parameters = 5, 64, "hadamard", 2
    layout = np.dtype(
        [("d", "<f2", (1, 1)), ("m", "<f2", (1, 1)), ("qh", "u1", (4,)), ("qs", "u1", (16,))]
    )

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """Codes count from the block's minimum, before that is rounded to half precision."""
        m = x.min(-1, keepdims=True)
        d = (x.max(-1, keepdims=True) - m) / 31
        q = np.minimum((x - m) * reciprocal(d) + np.float32(0.5), 31).astype(np.uint8)
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
        high, low = split_fifth(q)
        return self.pack(d=d, m=m, qh=high, qs=low)

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 2, 16]."""
        q = join_fifth(blocks["qh"], blocks["qs"]).astype(np.float32)
        return blocks["d"].astype(np.float32) * q + blocks["m"].astype(np.float32)


FORMAT = Q5_1()
