"""Codes of cache pages: sixteen of them as int32 lanes, and the numbers that they stand for."""

# The bodies of intrinsics are code generators: Numba finds their arguments by position, and
# `typingctx` is its convention.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pykv.kernels.simd import (
    _F32,
    _I8,
    _I16,
    _I32,
    LANES,
    _call,
    _load,
    f32x16,
    i32x16,
)
from pykv.kernels.simd_memory import _widen_half

_HALF = ir.VectorType(_F32, 8)
_HALF_INDICES = ir.VectorType(_I32, 8)


@intrinsic
def codes16(typingctx, address):
    """Sixteen bytes, as int32 lanes 0..255."""

    def codegen(context, builder, signature, args):
        return builder.zext(_load(builder, args[0], ir.VectorType(_I8, LANES)), i32x16.llvm)

    return i32x16(types.intp), codegen


@intrinsic(prefer_literal=True)
def moved(typingctx, x, count):
    """Int32 lanes shifted right by a literal, or left by a negative one."""
    n = count.literal_value

    def codegen(context, builder, signature, args):
        if n == 0:
            return args[0]
        shift = builder.lshr if n > 0 else builder.shl
        return shift(args[0], i32x16.constant(abs(n)))

    return i32x16(x, count), codegen


@intrinsic
def moved_by(typingctx, x, count):
    """Int32 lanes shifted right by a run-time count of 0 to 31."""

    def codegen(context, builder, signature, args):
        n = builder.trunc(args[1], _I32)
        vector = builder.insert_element(
            ir.Constant(i32x16.llvm, ir.Undefined), n, ir.Constant(_I32, 0)
        )
        every = builder.shuffle_vector(
            vector, vector, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        )
        return builder.lshr(args[0], every)

    return i32x16(i32x16, types.intp), codegen


@intrinsic(prefer_literal=True)
def picked(typingctx, x, y, mask):
    """The bits of x that a literal mask has, and of y the others."""
    m = mask.literal_value

    def codegen(context, builder, signature, args):
        mine = builder.and_(args[0], i32x16.constant(m))
        return builder.or_(mine, builder.and_(args[1], i32x16.constant(~m)))

    return i32x16(x, y, mask), codegen


@intrinsic(prefer_literal=True)
def low_bits(typingctx, x, count):
    """The lowest bits of int32 lanes, a literal number of them."""
    m = (1 << count.literal_value) - 1
    return i32x16(x, count), lambda context, builder, sig, args: builder.and_(
        args[0], i32x16.constant(m)
    )


def _features(context):
    triple, _, features = context.codegen().magic_tuple()
    return features.split(",")


@intrinsic
def table_entry(typingctx, x, table):
    """`table[x & 15]` of int32 lanes; `table` is a global tuple of 16 floats."""
    if not isinstance(table, types.BaseTuple) or table.count != LANES:
        return None

    def codegen(context, builder, signature, args):
        vector = ir.Constant(f32x16.llvm, ir.Undefined)
        for i, entry in enumerate(cgutils.unpack_tuple(builder, args[1], LANES)):
            value = entry if entry.type == _F32 else builder.fptrunc(entry, _F32)
            vector = builder.insert_element(vector, value, ir.Constant(_I32, i))
        return _permute(context, builder, vector, args[0])

    return f32x16(i32x16, table), codegen


@intrinsic
def vector_entry(typingctx, vector, x):
    """Lane `x & 15` of a vector, for each of 16 int32 lanes."""

    def codegen(context, builder, signature, args):
        return _permute(context, builder, *args)

    return f32x16(f32x16, i32x16), codegen


def _permute(context, builder, table, index):
    features = _features(context)
    if "+avx512f" in features:
        return _call(builder, "llvm.x86.avx512.permvar.sf.512", f32x16.llvm, table, index)
    if "+avx2" in features:
        return _two_halves(builder, table, index)
    return _one_by_one(builder, table, index)


def _part(builder, vector, first, count):
    mask = ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count)))
    return builder.shuffle_vector(vector, vector, mask)


def _two_halves(builder, table, index):
    """AVX2 looks up eight entries by the low three bits: once in each half of the table."""
    low, high = (_part(builder, table, first, 8) for first in (0, 8))
    parts = []
    for first in (0, 8):
        part = _part(builder, index, first, 8)
        a, b = (_call(builder, "llvm.x86.avx2.permps", _HALF, t, part) for t in (low, high))
        bit = builder.and_(part, ir.Constant(_HALF_INDICES, [8] * 8))
        upper = builder.icmp_unsigned("!=", bit, ir.Constant(_HALF_INDICES, [0] * 8))
        parts.append(builder.select(upper, b, a))
    mask = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    return builder.shuffle_vector(*parts, mask)


def _one_by_one(builder, table, index):
    result = ir.Constant(f32x16.llvm, ir.Undefined)
    kept = builder.and_(index, i32x16.constant(LANES - 1))
    for i in range(LANES):
        lane = ir.Constant(_I32, i)
        entry = builder.extract_element(table, builder.extract_element(kept, lane))
        result = builder.insert_element(result, entry, lane)
    return result


def _halves(context, builder, address, build):
    """Sixteen bytes widened to i16 by `build`, and those bits as half floats."""
    raw = _load(builder, address, ir.VectorType(_I8, LANES))
    return _widen_half(context, builder, build(raw))


@intrinsic
def widen_e5m2(typingctx, address):
    """Sixteen float8 e5m2: the upper bytes of half floats."""

    def codegen(context, builder, signature, args):
        words = ir.VectorType(_I16, LANES)

        def build(raw):
            return builder.shl(builder.zext(raw, words), ir.Constant(words, [8] * LANES))

        return _halves(context, builder, args[0], build)

    return f32x16(types.intp), codegen


@intrinsic
def widen_e4m3(typingctx, address):
    """Sixteen float8 e4m3, divided by 256: half floats with four bits of exponent."""

    def codegen(context, builder, signature, args):
        words = ir.VectorType(_I16, LANES)

        def build(raw):
            # the sign fills the upper bits; of those that are moved on, one must go
            up = builder.shl(builder.sext(raw, words), ir.Constant(words, [7] * LANES))
            return builder.and_(up, ir.Constant(words, [0xBF80] * LANES))

        return _halves(context, builder, args[0], build)

    return f32x16(types.intp), codegen
