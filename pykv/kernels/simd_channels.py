"""Sums over tokens of a key tile, sixteen channels at a time."""

# The bodies of intrinsics are code generators: Numba finds their arguments by position, and
# `typingctx` is its convention.  mypy cannot see through Numba's decorators here.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, type-arg"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pykv.kernels.simd import _I32, LANES, _fma, _load, f32x16

RUNS = 4  # vectors of a channel's 64 tokens
ROW_BYTES = 256


def _halves(builder, a, b, group):
    """Two vectors whose lanes lie in groups that are to be summed -> their halves' sums, in turn.

    The groups of both, halved, lie interleaved in the result.
    """
    half = group // 2
    low, high = [], []
    for start in range(0, LANES, group):
        for base in (start, LANES + start):
            low += range(base, base + half)
            high += range(base + half, base + group)
    lanes = ir.VectorType(_I32, LANES)
    return builder.fadd(
        builder.shuffle_vector(a, b, ir.Constant(lanes, low)),
        builder.shuffle_vector(a, b, ir.Constant(lanes, high)),
    )


@intrinsic
def channel_sums(typingctx, keys, p):
    """Lane i: the sum over t of p[t] * keys[i][t], of f32 p[64] and keys[16][64]."""

    def codegen(context, builder, signature, args):
        keys, p = args

        def at(address, offset):
            return _load(
                builder, builder.add(address, ir.Constant(address.type, offset)), f32x16.llvm
            )

        weights = [at(p, run * 64) for run in range(RUNS)]

        def products(channel):
            total = None
            for run, weight in enumerate(weights):
                key = at(keys, channel * ROW_BYTES + run * 64)
                total = (
                    builder.fmul(weight, key)
                    if total is None
                    else _fma(builder, weight, key, total)
                )
            return total

        def summed(first, step, group):
            """Channels first, first + step, ..., in the end a lane each."""
            if step == LANES:
                return products(first)
            a = summed(first, step * 2, group * 2)
            b = summed(first + step, step * 2, group * 2)
            return _halves(builder, a, b, group)

        return summed(0, 1, 2)

    return f32x16(types.intp, types.intp), codegen
