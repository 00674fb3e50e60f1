"""q5_0: 32 values in 22 bytes, 5.5 bits a value.

Layout: d f16 | qh u8 [4] | qs u8 [16];  v[j] = d * (q[j] - 16), where the low four bits of q are
the low nibbles of qs, then the high ones, and bit 4 of q[j] is bit j of qh.
Page: codes of 5 bits, then scales f16 [32-channel block][64 tokens].
Error: at most max |x| / 16 a value, opposite to the extremum, else half of that; and what rounding
d costs: max |x| / 2048 (or 16 * 2**-25).
Source: llama.cpp ggml/src/ggml-quants.c, quantize_row_q5_0_ref, dequantize_row_q5_0.
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


def split_fifth(q: U8) -> tuple[U8, U8]:
    """Codes u8 [..., 32], below 32 -> qh [..., 4], qs [..., 16]."""
    high = np.packbits(q >> np.uint8(4), axis=-1, bitorder="little")
    return high, join_nibbles(q & np.uint8(15))


def join_fifth(qh: U8, qs: U8) -> U8:
    """Qh [..., 4], qs [..., 16] -> codes u8 [..., 2, 16]."""
    low = bit_fields(qs, 4)
    high = np.unpackbits(qh, axis=-1, bitorder="little").reshape(low.shape)
    return low | high << np.uint8(4)


class Q5_0(CodedFormat):
    """Five bits and a scale, around zero."""

    roles = ("weight", "cache")
    bits, residual, transform = 5, 64, "hadamard"
    layout = np.dtype([("d", "<f2", (1, 1)), ("qh", "u1", (4,)), ("qs", "u1", (16,))])

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """The value of largest magnitude gets code 0."""
        d = extreme(x) * np.float32(-1 / 16)
        return np.minimum(x * reciprocal(d) + np.float32(16.5), 31).astype(np.uint8), (d,)

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """d * (code - 16)."""
        return parameters[0] * (codes.astype(np.float32) - 16)

    def encode_blocks(self, x: F32) -> Blocks:
        """F32 [..., N, 32] -> layout [..., N]."""
        q, (d,) = self.quantize(x)
        high, low = split_fifth(q)
        return self.pack(d=d, qh=high, qs=low)

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 2, 16]."""
        q = join_fifth(blocks["qh"], blocks["qs"]).astype(np.float32) - 16
        return blocks["d"].astype(np.float32) * q


FORMAT = Q5_0()
