"""mxfp4: 32 values in 17 bytes, 4.25 bits a value: E2M1 numbers and a power of two.

Layout: e u8 | qs u8 [16];  v[j] = 2 ** (e - 128) * TABLE[qs[j] & 15], and v[j + 16] likewise with
qs[j] >> 4. TABLE holds the E2M1 values doubled, so that they are whole. e = 255 is no NaN here.
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_mxfp4; ggml-impl.h, ggml_e8m0_to_fp32_half.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, BlockFormat, Blocks, bit_fields

TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class MXFP4(BlockFormat):
    """Four-bit floats with a shared exponent."""

    layout = np.dtype([("e", "u1", (1, 1)), ("qs", "u1", (16,))])

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 2, 16]."""
        scale = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)
        return scale * np.array(TABLE, np.float32)[bit_fields(blocks["qs"], 4)]


FORMAT = MXFP4()
