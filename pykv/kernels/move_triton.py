"""Pages as float32, on the GPU, for new pages that are made of tokens of others."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pykv.formats.coded import CodedFormat, find
from pykv.kernels import launch_triton
from pykv.kernels.coded_triton import code_bytes_keys, code_bytes_values, key_slice, value_slice
from pykv.kernels.encode_tiles_triton import BLOCK
from pykv.kernels.outliers_triton import entries
from pykv.kernels.plain_triton import ALIGN, PAGE

AT_ONCE = tl.constexpr(256)  # outliers


@triton.jit
def decode_pages(
    pool, places, numbers, extra, out, extra_stride,
    KEYS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, AXIS: tl.constexpr,
    PARAMETERS: tl.constexpr, OUTLIERS: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """Pages at places i64 [n] of KV heads i64 [n] to f32 [n, 64, D]; 32 channels for a program.

    Where the place is 0, nothing is written.
    """
    i, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + i)
    if place != 0:
        page, of_head = pool + place * ALIGN, extra + tl.load(numbers + i) * extra_stride
        to, t = out + i * (PAGE * D), tl.arange(0, PAGE)
        if KEYS:
            x = key_slice(page, of_head, b * BLOCK, D, BLOCK, BITS, AXIS, PARAMETERS, level)
            c = tl.arange(0, BLOCK) + b * BLOCK
            at = t[None, :] * D + c[:, None]
            tl.store(to + at, x.to(tl.float32), (c < D)[:, None] & (t >= 0)[None, :])
        else:
            for half in tl.static_range(2):
                x = value_slice(
                    page, of_head, b * BLOCK, half, D, BLOCK, BITS, AXIS, PARAMETERS, level
                )
                c = tl.arange(0, 16) + (b * BLOCK + half * 16)
                at = t[:, None] * D + c[None, :]
                tl.store(to + at, x.to(tl.float32), (t >= 0)[:, None] & (c < D)[None, :])
        if OUTLIERS > 0:
            # they stand in the place of what their codes mean
            tl.debug_barrier()
            slots = page + (code_bytes_keys(D, BITS) if KEYS else code_bytes_values(D, BITS))
            slots += 0 if KEYS else 4 * PAGE
            for first in range(0, OUTLIERS, AT_ONCE):
                where, value, used = entries(slots, first, OUTLIERS, AT_ONCE)
                if KEYS:
                    channel, token = where // PAGE, where % PAGE
                else:
                    channel, token = where // (32 * PAGE) * 32 + where % 32, where // 32 % PAGE
                tl.store(to + token * D + channel, value, used & (channel // BLOCK == b))


def decoder(name: str, side: str, d: int) -> dict[str, Any]:
    """Compile-time parameters of `decode_pages`."""
    own, keys, format_ = launch_triton.module(name), side == "key", find(name)
    return {
        "KEYS": keys, "D": d, "BITS": own.BITS, "AXIS": own.KEY_AXIS if keys else own.VALUE_AXIS,
        "PARAMETERS": own.PARAMETERS, "level": own.level,
        "OUTLIERS": format_.n_outliers(d) if isinstance(format_, CodedFormat) else 0,
    }  # fmt: skip


def decode(
    pool: Any, places: Any, heads: Any, extra: Any, out: Any, name: str, side: str, d: int
) -> None:
    """Pages of type `name` at places i64 [n], of KV heads i64 [n], as out f32 [n, 64, d].

    extra f32 [KV heads, m] is what `extra` of launch_triton.py has.
    """
    # a product and a sum that are rounded once are not what the format means
    decode_pages[len(places), (d + 31) // 32](
        pool, places, heads, extra, out, extra.shape[1], **decoder(name, side, d),
        enable_fp_fusion=False,
    )  # fmt: skip
