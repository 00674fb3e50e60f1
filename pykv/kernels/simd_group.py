"""Groups: one vector per query head (or input row), kept in registers as a tuple."""

# The bodies of intrinsics are code generators: Numba finds their arguments by position, and
# `typingctx` is its convention.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pykv.kernels.simd import (
    _F32,
    _fma,
    _load,
    _splat,
    _store,
    f32x16,
)

# groups: one vector per query head (or input row), kept in registers as a tuple


@intrinsic(prefer_literal=True)
def zeros(typingctx, count):
    """A group of `count` (a literal) zero vectors."""
    group = types.UniTuple(f32x16, count.literal_value)

    def codegen(context, builder, signature, args):
        return context.make_tuple(builder, group, [f32x16.constant(0.0)] * group.count)

    return group(count), codegen


def _map_group(group, build):
    """Code generator: `build(builder, i, member_i, *args)` for each member of args[0]."""

    def codegen(context, builder, signature, args):
        members = cgutils.unpack_tuple(builder, args[0], group.count)
        mapped = [build(builder, i, m, *args[1:]) for i, m in enumerate(members)]
        return context.make_tuple(builder, group, mapped)

    return codegen


def _at(builder, address, stride, i):
    return builder.add(address, builder.mul(stride, ir.Constant(stride.type, i)))


@intrinsic
def add_products(typingctx, group, address, stride, x):
    """`group[i] += a[i] * x` where `a[i]` is the float32 at `address + i * stride`."""

    def build(b, i, acc, address, stride, x):
        return _fma(b, _splat(b, _load(b, _at(b, address, stride, i), _F32)), x, acc)

    return group(group, types.intp, types.intp, f32x16), _map_group(group, build)


@intrinsic
def add_scaled_products(typingctx, group, address, stride, scale, x):
    """`group[i] += a[i] * scale * x` where `a[i]` is the float32 at `address + i * stride`."""

    def build(b, i, acc, address, stride, scale, x):
        a = _load(b, _at(b, address, stride, i), _F32)
        return _fma(b, _splat(b, b.fmul(a, scale)), x, acc)

    signature = group(group, types.intp, types.intp, types.float32, f32x16)
    return signature, _map_group(group, build)


@intrinsic
def add_row_products(typingctx, group, address, stride, x):
    """`group[i] += r[i] * x` where `r[i]` are the 16 float32 at `address + i * stride`."""

    def build(b, i, acc, address, stride, x):
        return _fma(b, _load(b, _at(b, address, stride, i), f32x16.llvm), x, acc)

    return group(group, types.intp, types.intp, f32x16), _map_group(group, build)


@intrinsic
def add_group_times(typingctx, group, other, x):
    """`group[i] += other[i] * x`."""

    def codegen(context, builder, signature, args):
        left = cgutils.unpack_tuple(builder, args[0], group.count)
        right = cgutils.unpack_tuple(builder, args[1], group.count)
        members = [_fma(builder, r, args[2], acc) for acc, r in zip(left, right, strict=True)]
        return context.make_tuple(builder, group, members)

    return group(group, group, f32x16), codegen


@intrinsic
def add_groups(typingctx, group, other):
    """`group[i] + other[i]`."""

    def codegen(context, builder, signature, args):
        left = cgutils.unpack_tuple(builder, args[0], group.count)
        right = cgutils.unpack_tuple(builder, args[1], group.count)
        members = [builder.fadd(a, b) for a, b in zip(left, right, strict=True)]
        return context.make_tuple(builder, group, members)

    return group(group, group), codegen


@intrinsic
def load_group(typingctx, group, address, stride):
    """A group like `group`, its member i read from `address + i * stride`."""

    def build(b, i, member, address, stride):
        return _load(b, _at(b, address, stride, i), f32x16.llvm)

    return group(group, types.intp, types.intp), _map_group(group, build)


@intrinsic
def store_group(typingctx, address, stride, group):
    """Member i to `address + i * stride`."""

    def codegen(context, builder, signature, args):
        for i, member in enumerate(cgutils.unpack_tuple(builder, args[2], group.count)):
            _store(builder, member, _at(builder, args[0], args[1], i))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, group), codegen
