"""q4_k: 256 values in 144 bytes, 4.5 bits a value.

Layout: d f16 | dmin f16 | scales u8 [12] | qs u8 [4][32]. The values are 8 runs of 32;
v[p][j] = d * s[p] * q[p][j] - dmin * m[p], where q[p] are the low nibbles of qs[p / 2] for even p,
the high ones for odd p. s and m have six bits: for p < 4 those of scales[p] and scales[p + 4]; for
p >= 4 the low four are the low (s) and high (m) nibble of scales[p + 4], and the high two are bits
6-7 of scales[p - 4] and scales[p].
Source: llama.cpp ggml/src/ggml-quants.c, dequantize_row_q4_K, get_scale_min_k4.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, U8, BlockFormat, Blocks, bit_fields


def scales_and_minima(packed: U8) -> tuple[F32, F32]:
    """u8 [..., 12] -> f32 [..., 8, 1] twice, 0 to 63."""
    first, second, last = (packed[..., i : i + 4] for i in (0, 4, 8))
    s = np.concatenate([first & 63, last & 15 | first >> 6 << 4], -1)
    m = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], -1)
    return s[..., None].astype(np.float32), m[..., None].astype(np.float32)


class Q4_K(BlockFormat):
    """Four bits, scales and minima in two levels."""

    block_len = 256
    layout = np.dtype(
        [("d", "<f2", (1, 1)), ("m", "<f2", (1, 1)), ("scales", "u1", (12,)), ("qs", "u1", (4, 32))]
    )

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, 8, 32]."""
        s, m = scales_and_minima(blocks["scales"])
        q = bit_fields(blocks["qs"], 4).reshape(*blocks.shape, 8, 32).astype(np.float32)
        return blocks["d"].astype(np.float32) * s * q - blocks["m"].astype(np.float32) * m


FORMAT = Q4_K()
