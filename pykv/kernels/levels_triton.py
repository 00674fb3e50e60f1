"""Tables of levels for the GPU: what a code stands for where arithmetic does not say."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device

LEVELS = tl.constexpr(16)  # f32 of a table, whatever the codes' bits


@device
def looked_up(table, code):
    """f32 like `code`, i32 [N] or [M, N]: the table's numbers.

    The table is read once and its numbers are gathered: a load for each code would be prefetched
    like a page's bytes, by 4 bytes and an address each.
    """
    levels = tl.load(table + tl.arange(0, LEVELS))
    if len(code.shape) == 2:
        levels = tl.broadcast_to(levels[None, :], (code.shape[0], LEVELS))
        found = tl.gather(levels, code, 1)
    else:
        found = tl.gather(levels, code, 0)
    return found
