"""Sums of byte products: what AVX-512 VNNI does in one instruction.

`dot` multiplies 64 unsigned codes by 64 signed bytes and adds each four neighbouring products to
one of 16 int32 lanes, exactly. Only kernels that were chosen for a CPU with VNNI may use it.
Source: Intel Intrinsics Guide, _mm512_dpbusd_epi32.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from pykv.kernels.simd import (
    _F32,
    _I8,
    _I16,
    _I32,
    _I64,
    _call,
    _load,
    _store,
    f32x16,
    i32x16,
)


class Bytes(types.Type):
    """Numba type of 64 byte lanes."""

    llvm = ir.VectorType(_I8, 64)

    def __init__(self) -> None:
        super().__init__("u8x64")


u8x64 = Bytes()


@register_model(Bytes)
class _BytesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, Bytes.llvm)


def _bytes(value):
    return ir.Constant(Bytes.llvm, [value] * 64)


def _join(builder, low, high):
    """Two vectors, one after the other."""
    n = low.type.count
    mask = ir.Constant(ir.VectorType(_I32, 2 * n), list(range(2 * n)))
    return builder.shuffle_vector(low, high, mask)


@intrinsic
def load_64(typingctx, address):
    """64 bytes."""

    def codegen(context, builder, signature, args):
        return _load(builder, args[0], Bytes.llvm)

    return u8x64(types.intp), codegen


@intrinsic
def load_4x16(typingctx, a, b, c, d):
    """16 bytes from each of four addresses."""

    def codegen(context, builder, signature, args):
        parts = [_load(builder, x, ir.VectorType(_I8, 16)) for x in args]
        return _join(builder, _join(builder, *parts[:2]), _join(builder, *parts[2:]))

    return u8x64(types.intp, types.intp, types.intp, types.intp), codegen


@intrinsic
def load_2x32(typingctx, a, b):
    """32 bytes from each of two addresses."""

    def codegen(context, builder, signature, args):
        return _join(builder, *(_load(builder, x, ir.VectorType(_I8, 32)) for x in args))

    return u8x64(types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def bits(typingctx, x, shift, width):
    """Bits `shift` to `shift + width - 1` (literals) of each lane."""
    low, size = shift.literal_value, width.literal_value

    def codegen(context, builder, signature, args):
        value = builder.lshr(args[0], _bytes(low)) if low else args[0]
        return builder.and_(value, _bytes((1 << size) - 1)) if low + size < 8 else value

    return u8x64(x, shift, width), codegen


@intrinsic(prefer_literal=True)
def flip(typingctx, x, mask):
    """Each lane xor a literal."""
    value = mask.literal_value

    def codegen(context, builder, signature, args):
        return builder.xor(args[0], _bytes(value))

    return u8x64(x, mask), codegen


@intrinsic(prefer_literal=True)
def add_where(typingctx, x, mask, amount):
    """Lanes whose bit of the int64 `mask` is set, plus a literal."""
    value = amount.literal_value

    def codegen(context, builder, signature, args):
        flags = builder.bitcast(args[1], ir.VectorType(ir.IntType(1), 64))
        return builder.select(flags, builder.add(args[0], _bytes(value)), args[0])

    return u8x64(x, types.intp, amount), codegen


@intrinsic(prefer_literal=True)
def two_bits_up(typingctx, x, low_shift, high_shift):
    """(x >> shift & 3) << 4: lanes 0-31 by the first literal shift, lanes 32-63 by the second."""
    shifts = (low_shift.literal_value, high_shift.literal_value)

    def codegen(context, builder, signature, args):
        words = builder.bitcast(args[0], ir.VectorType(_I16, 32))
        left = [max(4 - s, 0) for s in shifts]
        right = [max(s - 4, 0) for s in shifts]
        vector = ir.VectorType(_I16, 32)
        if any(left):
            words = builder.shl(words, ir.Constant(vector, [left[0]] * 16 + [left[1]] * 16))
        if any(right):
            words = builder.lshr(words, ir.Constant(vector, [right[0]] * 16 + [right[1]] * 16))
        return builder.and_(builder.bitcast(words, Bytes.llvm), _bytes(0x30))

    return u8x64(x, low_shift, high_shift), codegen


@intrinsic
def either(typingctx, x, y):
    """Each lane of x or y."""
    return u8x64(x, y), lambda context, builder, sig, args: builder.or_(*args)


@intrinsic
def twice(typingctx, address):
    """The 32 bytes at an address, two times."""

    def codegen(context, builder, signature, args):
        half = _load(builder, args[0], ir.VectorType(_I8, 32))
        return _join(builder, half, half)

    return u8x64(types.intp), codegen


@intrinsic
def dot(typingctx, total, codes, address):
    """`total` plus the products of the codes and the 64 signed bytes at `address`."""

    def codegen(context, builder, signature, args):
        name, signed = "llvm.x86.avx512.vpdpbusd.512", _load(builder, args[2], Bytes.llvm)
        codes_ = args[1]
        if llvm.llvm_version_info[0] < 22:  # older LLVM declares all operands as int32 lanes
            codes_, signed = (builder.bitcast(v, i32x16.llvm) for v in (codes_, signed))
        return _call(builder, name, i32x16.llvm, args[0], codes_, signed)

    return i32x16(i32x16, u8x64, types.intp), codegen


@intrinsic
def no_sums(typingctx):
    """16 int32 zeros."""
    return i32x16(), lambda context, builder, sig, args: i32x16.constant(0)


@intrinsic(prefer_literal=True)
def times_two_to(typingctx, x, count):
    """Int32 lanes shifted left by a literal."""
    n = count.literal_value

    def codegen(context, builder, signature, args):
        return builder.shl(args[0], i32x16.constant(n))

    return i32x16(x, count), codegen


@intrinsic
def digit(typingctx, x):
    """The signed low byte of int32 lanes: -128..127."""

    def codegen(context, builder, signature, args):
        up = builder.shl(args[0], i32x16.constant(24))
        return builder.ashr(up, i32x16.constant(24))

    return i32x16(i32x16), codegen


@intrinsic
def without_digit(typingctx, x, low):
    """(x - low) / 256, exact when `low` is the digit of x."""

    def codegen(context, builder, signature, args):
        return builder.ashr(builder.sub(*args), i32x16.constant(8))

    return i32x16(i32x16, i32x16), codegen


@intrinsic
def store_digit(typingctx, address, x):
    """The low bytes of int32 lanes, as 16 bytes."""

    def codegen(context, builder, signature, args):
        _store(builder, builder.trunc(args[1], ir.VectorType(_I8, 16)), args[0])
        return context.get_dummy_value()

    return types.void(types.intp, i32x16), codegen


@intrinsic
def sum_lanes(typingctx, x):
    """The sum of int32 lanes, as int64."""

    def codegen(context, builder, signature, args):
        total = _call(builder, "llvm.vector.reduce.add.v16i32", _I32, args[0])
        return builder.sext(total, _I64)

    return types.intp(i32x16), codegen


@intrinsic
def bytes_of(typingctx, low, high):
    """The 16 bytes of two int64 as float32."""

    def codegen(context, builder, signature, args):
        pair = ir.Constant(ir.VectorType(_I64, 2), ir.Undefined)
        for i in (0, 1):
            pair = builder.insert_element(pair, args[i], ir.Constant(_I32, i))
        lanes = builder.bitcast(pair, ir.VectorType(_I8, 16))
        return builder.uitofp(lanes, f32x16.llvm)

    return f32x16(types.intp, types.intp), codegen


@intrinsic
def two_halves(typingctx, low, high):
    """One float32 in lanes 0-7, another in lanes 8-15."""

    def codegen(context, builder, signature, args):
        pair = ir.Constant(ir.VectorType(_F32, 2), ir.Undefined)
        for i in (0, 1):
            pair = builder.insert_element(pair, args[i], ir.Constant(_I32, i))
        mask = ir.Constant(ir.VectorType(_I32, 16), [0] * 8 + [1] * 8)
        return builder.shuffle_vector(pair, ir.Constant(pair.type, ir.Undefined), mask)

    return f32x16(types.float32, types.float32), codegen


def _halves_of_four(builder, words):
    """The float16 in four i16, as <4 x float>; gathered without the ports that vectors need."""
    total = None
    for i, word_ in enumerate(words):
        wide = builder.shl(builder.zext(word_, _I64), ir.Constant(_I64, 16 * i))
        total = wide if total is None else builder.or_(total, wide)
    halves = builder.bitcast(total, ir.VectorType(ir.HalfType(), 4))
    return builder.fpext(halves, ir.VectorType(_F32, 4))


@intrinsic(prefer_literal=True)
def spread_halves(typingctx, a, b, c, d, count, first):
    """The float16 at four addresses, each in 16 / `count` lanes, beginning with the `first`."""
    n, f = count.literal_value, first.literal_value

    def codegen(context, builder, signature, args):
        words = [_load(builder, x, _I16) for x in args[:4]]
        values = _halves_of_four(builder, words)
        lanes = [f + i * n // 16 for i in range(16)]
        mask = ir.Constant(ir.VectorType(_I32, 16), lanes)
        return builder.shuffle_vector(values, ir.Constant(values.type, ir.Undefined), mask)

    return f32x16(*(types.intp,) * 4, count, first), codegen


@intrinsic(prefer_literal=True)
def spread(typingctx, address, count, step, first):
    """16 lanes in `count` equal parts: part i holds the float32 number `first + step * i`."""
    n, s, f = (v.literal_value for v in (count, step, first))

    def codegen(context, builder, signature, args):
        size = 1 << (f + s * (n - 1)).bit_length()
        size = max(size, 4)
        values = _load(builder, args[0], ir.VectorType(_F32, size))
        lanes = [f + s * (i * n // 16) for i in range(16)]
        mask = ir.Constant(ir.VectorType(_I32, 16), lanes)
        return builder.shuffle_vector(values, ir.Constant(values.type, ir.Undefined), mask)

    return f32x16(types.intp, count, step, first), codegen
