"""Calls, counters that threads share, waiting and prefetching."""

# The bodies of intrinsics are code generators: Numba finds their arguments by position, and
# `typingctx` is its convention.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pykv.kernels.simd import (
    _I8,
    _I32,
    _I64,
    _call,
    _pointer,
)

# control


@intrinsic
def call_kernel(typingctx, function, ctx, task, worker):
    """Call the kernel at address `function`."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64])
        builder.call(_pointer(builder, args[0], kind), args[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), codegen


@intrinsic
def fetch_add(typingctx, address, amount):
    """Add `amount` to the int64 at `address` in one step; returns what stood there.

    Sequentially consistent: what comes after it in the program is not read before it.
    """

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def call_plain(typingctx, function):
    """Call the C function without parameters at that address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [])
        builder.call(_pointer(builder, args[0], kind), [])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def load_acquire(typingctx, address):
    """The int64 at `address`, as the thread that stored it last left memory."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0], _I64), "acquire", 8)

    return types.intp(types.intp), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Store an int64 after everything that this thread has written."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0], _I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at `address`, which need not be mapped."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, args[0], _I8)
        hints = [ir.Constant(_I32, n) for n in (0, 3, 1)]  # read, keep, data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *hints)
        return context.get_dummy_value()

    return types.void(types.intp), codegen
