"""iq4_nl: 32 values in 18 bytes, 4.5 bits a value, from a table of 16 uneven steps.

Layout: d f16 | qs u8 [16];  v[j] = d * TABLE[qs[j] & 15],  v[j + 16] = d * TABLE[qs[j] >> 4].
Page: codes of 4 bits, then scales f16 [32-channel block][64 tokens].
Error: at most max |x| / 4 a value, opposite to the extremum, where the table ends early and the
refitted d adds to it (and 127 * 2**-25 for rounding a small d).
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_iq4_nl,
quantize_row_iq4_nl_impl (ntry = -1, without importances); ggml-common.h, kvalues_iq4nl.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, U8, Blocks, bit_fields, extreme, join_nibbles, reciprocal
from pykv.formats.coded import CodedFormat, HeadNumbers, Parameters

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MIDDLES = (np.array(TABLE[:-1], np.float32) + np.array(TABLE[1:], np.float32)) / 2


def _sum(x: F32) -> F32:
    """The sum of the last axis, one float32 after the other."""
    return np.cumsum(x, axis=-1, dtype=np.float32)[..., -1:]


class IQ4_NL(CodedFormat):
    """Four bits into a table, and a scale."""

    roles = ("weight", "cache")
    bits, residual, transform = 4, 64, "hadamard"
    layout = np.dtype([("d", "<f2", (1, 1)), ("qs", "u1", (16,))])

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """Nearest steps for a first scale, then the scale that fits them best.

        An error is weighted by the square of the value, as ggml does without importances; its
        search over several first scales is for weights only.
        """
        first = extreme(x) / np.float32(TABLE[0])
        tiny = np.abs(x).max(-1, keepdims=True) < np.float32(1e-15)
        scaled = x * np.where(tiny, np.float32(0), reciprocal(first))
        # of two steps equally near the upper one
        codes = np.searchsorted(_MIDDLES, scaled, side="right").astype(np.uint8)
        steps = np.array(TABLE, np.float32)[codes]
        weight = x * x
        above = _sum(weight * steps * x)
        below = _sum(weight * steps * steps)
        fits = ~tiny & (below > 0)
        d = np.where(fits, above / np.where(fits, below, np.float32(1)), np.float32(0))
        # the squares of values past 1e19 overflow
        d = np.where(np.isfinite(d), d, first)
        return np.where(tiny, np.uint8(0), codes), (d,)

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """d * TABLE[code]."""
        return parameters[0] * np.array(TABLE, np.float32)[codes]

    def encode_blocks(self, x: F32) -> Blocks:
        """F32 [..., N, 32] -> layout [..., N]."""
        q, (d,) = self.quantize(x)
        return self.pack(d=d, qs=join_nibbles(q))

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 2, 16]."""
        steps = np.array(TABLE, np.float32)[bit_fields(blocks["qs"], 4)]
        return blocks["d"].astype(np.float32) * steps


FORMAT = IQ4_NL()
