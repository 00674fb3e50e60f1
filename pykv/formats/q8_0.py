"""q8_0: 32 values in 34 bytes, 8.5 bits a value.

Layout: d f16 | qs i8 [32];  v[j] = d * qs[j].
Page: codes of 8 bits, then scales f16 [32-channel block][64 tokens].
Error: at most max |x| / 254 a value, and what rounding d costs: max |x| / 2048 (or 127 * 2**-25).
Source: llama.cpp ggml/src/ggml-quants.c, quantize_row_q8_0_ref, dequantize_row_q8_0.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, U8, Blocks, reciprocal
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters


class Q8_0(CodedFormat):
    """A signed byte and a scale."""

    roles = ("weight", "cache")
    bits = 8
    layout = np.dtype([("d", "<f2", (1,)), ("qs", "i1", (32,))])

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """Codes -127 to 127, halves rounded away from zero."""
        d = np.abs(x).max(-1, keepdims=True) / 127
        scaled = x * reciprocal(d)
        whole = np.trunc(scaled)
        # twice the fraction is exact; adding a half to the value first would not be
        q = whole + np.trunc(2 * (scaled - whole))
        return q.astype(np.int8).view(np.uint8), (d,)

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """d * code."""
        return parameters[0] * codes.view(np.int8).astype(np.float32)

    def encode_blocks(self, x: F32) -> Blocks:
        """F32 [..., N, 32] -> layout [..., N]."""
        q, (d,) = self.quantize(x)
        return self.pack(d=d, qs=q.view(np.int8))

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 32]."""
        return blocks["d"].astype(np.float32) * blocks["qs"].astype(np.float32)


FORMAT = Q8_0()
