"""Norms, RoPE, activations and sums on the GPU, over rows that are contiguous f32.

Launchers choose how much a program takes by the row's width alone, so that a row's bits do not
depend on how many there are; only Triton's interpreter, where a program costs about a millisecond,
takes more of them at a time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pykv.kernels.jit_triton import FUSED, device, is_interpreted

LEAST, MOST = 1024, 1 << 16  # values of a program, on a GPU and in the interpreter


@device
def sigmoid(x):
    """1 / (1 + exp(-x)), of which no part overflows."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@device
def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@device
def gelu(x):
    """The tanh form of GELU."""
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


ACTIVATIONS = {"silu": silu, "gelu": gelu}


@device
def sum_of(x, y, factor):
    """x + y."""
    return x + y


@device
def scaled(x, y, factor):
    """x * factor."""
    return x * factor


@device
def capped(x, y, limit):
    """limit * tanh(x / limit)."""
    # tanh(u) = 2 / (1 + exp(-2 u)) - 1
    return limit * (2.0 * sigmoid(x * (2.0 / limit)) - 1.0)


@device
def silu_gate(x, y, factor):
    """silu(x) * y."""
    return silu(x) * y


@device
def gelu_gate(x, y, factor):
    """gelu(x) * y."""
    return gelu(x) * y


@triton.jit
def elementwise(
    x, y, out, n, width, factor, BLOCK: tl.constexpr, PAIRED: tl.constexpr, what: tl.constexpr
):
    """out [n] = what(x, y, factor), where y has `width` values and is repeated, if PAIRED."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, i < n, 0.0)
    b = a
    if PAIRED:
        b = tl.load(y + i % width, i < n, 0.0)
    tl.store(out + i, what(a, b, factor), i < n)


@triton.jit(do_not_specialize=["n_rows"])
def normalise(
    x, weight, add, out, n_rows, n, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Rows of n values over their root mean square, times `weight` (+ add)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    mask, place = (row < n_rows) & (i < n), row.to(tl.int64) * n + i
    values = tl.load(x + place, mask, 0.0)
    share = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / n + eps)
    values = values * share[:, None] * tl.load(weight + i, i < n, 0.0)
    if ADD:
        values += tl.load(add + place, mask, 0.0)
    tl.store(out + place, values, mask)


def rows_at_once(width: int, n_rows: int) -> int:
    """Rows of `width` values, a power of two, that a program takes."""
    if is_interpreted():
        return max(1, min(MOST // width, triton.next_power_of_2(n_rows)))
    return max(1, LEAST // width)


def rms_norm(x: Any, weight: Any, out: Any, eps: float, add: Any = None) -> None:
    """out [..., n] = x / sqrt(mean(x**2) + eps) * weight (+ add [..., n])."""
    n = x.shape[-1]
    n_rows, width = x.numel() // n, triton.next_power_of_2(n)
    rows = rows_at_once(width, n_rows)
    normalise[(triton.cdiv(n_rows, rows),)](
        x, weight, x if add is None else add, out, n_rows, n, eps,
        ROWS=rows, WIDTH=width, ADD=add is not None, num_warps=min(8, max(1, width * rows // 256)),
        **FUSED,
    )  # fmt: skip


def _each(what: Any, x: Any, y: Any, out: Any, factor: float = 0.0) -> None:
    n = x.numel()
    block = min(MOST, triton.next_power_of_2(n)) if is_interpreted() else LEAST
    paired = y is not None
    elementwise[(triton.cdiv(n, block),)](
        x, y if paired else x, out, n, y.numel() if paired else n, factor,
        BLOCK=block, PAIRED=paired, what=what, **FUSED,
    )  # fmt: skip


def add(x: Any, y: Any, out: Any) -> None:
    """out = x + y, of one shape."""
    _each(sum_of, x, y, out)


def bias(x: Any, weight: Any, out: Any) -> None:
    """out [..., n] = x + weight [n]."""
    _each(sum_of, x, weight, out)


def scale(x: Any, factor: float, out: Any) -> None:
    """out = x * factor."""
    _each(scaled, x, None, out, factor)


def softcap(x: Any, limit: float, out: Any) -> None:
    """out = limit * tanh(x / limit)."""
    _each(capped, x, None, out, limit)


def gate(gate: Any, up: Any, out: Any, act: str) -> None:
    """out = act(gate) * up; act: silu or gelu."""
    _each({"silu": silu_gate, "gelu": gelu_gate}[act], gate, up, out)
