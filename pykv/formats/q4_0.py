"""q4_0: 32 values in 18 bytes, 4.5 bits a value.

Layout: d f16 | qs u8 [16];  v[j] = d * ((qs[j] & 15) - 8),  v[j + 16] = d * ((qs[j] >> 4) - 8).
Page: codes of 4 bits, then scales f16 [32-channel block][64 tokens].
Error: at most max |x| / 8 a value, opposite to the extremum, else half of that; and what rounding d
costs: max |x| / 2048 (or 8 * 2**-25).
Source: llama.cpp ggml/src/ggml-quants.c, quantize_row_q4_0_ref, dequantize_row_q4_0.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import (
    F32,
    U8,
    Blocks,
    bit_fields,
    extreme,
    join_nibbles,
    reciprocal,
)
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters


class Q4_0(CodedFormat):
    """Four bits and a scale, around zero."""

    roles = ("weight", "cache")
    bits, residual, transform = 4, 64, "hadamard"
    layout = np.dtype([("d", "<f2", (1, 1)), ("qs", "u1", (16,))])

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """The value of largest magnitude gets code 0."""
        d = extreme(x) * np.float32(-1 / 8)
        return np.minimum(x * reciprocal(d) + np.float32(8.5), 15).astype(np.uint8), (d,)

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """d * (code - 8)."""
        return parameters[0] * (codes.astype(np.float32) - 8)

    def encode_blocks(self, x: F32) -> Blocks:
        """F32 [..., N, 32] -> layout [..., N]."""
        q, (d,) = self.quantize(x)
        return self.pack(d=d, qs=join_nibbles(q))

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 2, 16]."""
        q = bit_fields(blocks["qs"], 4).astype(np.float32) - 8
        return blocks["d"].astype(np.float32) * q


FORMAT = Q4_0()
