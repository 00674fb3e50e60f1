"""Sixteen-lane SIMD values inside Numba kernels.

A kernel holds `f32x16` (and `i32x16`, `u8x16`, `i8x16`) values in ordinary variables and combines
them with Python operators; each operation becomes one LLVM vector instruction, which LLVM splits
or fuses for the machine at hand (one AVX-512 register, two AVX2, four NEON). Memory is addressed
by plain integers, so that a kernel can read a memory-mapped file.

Loads and stores take byte addresses and need no alignment. Nothing is bounds-checked.
"""

# The bodies of intrinsics are code generators: Numba finds their arguments by position, and
# `typingctx` is its convention.  mypy cannot see through Numba's decorators here.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, type-arg"

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

LANES = 16
_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_F32, _F16 = ir.FloatType(), ir.HalfType()


class Vector(types.Type):
    """Numba type of a 16-lane vector whose lanes have LLVM type `lane`."""

    def __init__(self, name: str, lane: ir.Type, signed: bool = True) -> None:
        self.lane, self.signed = lane, signed
        super().__init__(name)

    @property
    def llvm(self) -> ir.VectorType:
        """The LLVM type."""
        return ir.VectorType(self.lane, LANES)

    def constant(self, value: Any) -> ir.Constant:
        """`value` in every lane."""
        return ir.Constant(self.llvm, [value] * LANES)


f32x16 = Vector("f32x16", _F32)
i32x16 = Vector("i32x16", _I32)
u8x16 = Vector("u8x16", _I8, signed=False)
i8x16 = Vector("i8x16", _I8)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


def _splat(builder, scalar):
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, undefined, lanes)


def _call(builder, name, result, *args):
    function_type = ir.FunctionType(result, [a.type for a in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, args)


def _fma(builder, x, y, z):
    return _call(builder, "llvm.fma.v16f32", f32x16.llvm, x, y, z)


def _pointer(builder, address, pointee):
    return builder.inttoptr(address, pointee.as_pointer())


def _load(builder, address, pointee):
    return builder.load(_pointer(builder, address, pointee), align=1)


def _store(builder, value, address):
    builder.store(value, _pointer(builder, address, value.type), align=1)


# arithmetic


@intrinsic
def splat(typingctx, scalar):
    """A vector with `scalar` (float32) in every lane."""
    return f32x16(types.float32), lambda context, builder, sig, args: _splat(builder, args[0])


@intrinsic
def fma(typingctx, x, y, z):
    """`x * y + z`, rounded once."""
    signature = f32x16(f32x16, f32x16, f32x16)
    return signature, lambda context, builder, sig, args: _fma(builder, *args)


@intrinsic
def fma_scalar(typingctx, x, y, z):
    """`x * y + z` of float32 scalars, rounded once."""

    def codegen(context, builder, sig, args):
        return _call(builder, "llvm.fma.f32", _F32, *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _operator(op, float_op, int_op):
    @intrinsic
    def lanewise(typingctx, x, y):
        def codegen(context, builder, signature, args):
            return getattr(builder, float_op if x == f32x16 else int_op)(*args)

        return x(x, y), codegen

    @overload(op, inline="always")
    def overloaded(x, y):
        if isinstance(x, Vector) and x == y:
            return lambda x, y: lanewise(x, y)
        if x == f32x16 and y == types.float32:
            return lambda x, y: lanewise(x, splat(y))
        return None


_operator(operator.add, "fadd", "add")
_operator(operator.sub, "fsub", "sub")
_operator(operator.mul, "fmul", "mul")


def _integer_operator(op, name):
    @intrinsic
    def lanewise(typingctx, x, y):
        def codegen(context, builder, signature, args):
            return getattr(builder, name)(*args)

        return x(x, y), codegen

    @overload(op, inline="always")
    def overloaded(x, y):
        if isinstance(x, Vector) and x == y and x != f32x16:
            return lambda x, y: lanewise(x, y)
        return None


_integer_operator(operator.and_, "and_")
_integer_operator(operator.or_, "or_")


@intrinsic
def divide(typingctx, x, y):
    """`x / y` on each lane: a true division, rounded once."""
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fdiv(*args)


def _unary(source, result, build, doc):
    @intrinsic
    def function(typingctx, x):
        return result(source), lambda context, builder, sig, args: build(builder, args[0])

    function.__doc__ = doc
    return function


def _named(name, result):
    return lambda builder, x: _call(builder, name, result, x)


nearest = _unary(
    f32x16, f32x16, _named("llvm.rint.v16f32", f32x16.llvm), "Rounded to nearest, ties to even."
)
absolute = _unary(f32x16, f32x16, _named("llvm.fabs.v16f32", f32x16.llvm), "Without the sign.")
to_i32 = _unary(
    f32x16, i32x16, lambda b, x: b.fptosi(x, i32x16.llvm), "Each lane truncated to int32."
)
power_of_two = _unary(
    i32x16,
    f32x16,
    lambda b, n: b.bitcast(b.shl(b.add(n, i32x16.constant(127)), i32x16.constant(23)), f32x16.llvm),
    "2**n for int32 lanes in -126..127.",
)
reduce_max = _unary(
    f32x16, types.float32, _named("llvm.vector.reduce.fmax.v16f32", _F32), "The largest lane."
)


def _binary(name, doc):
    @intrinsic
    def function(typingctx, x, y):
        def codegen(context, builder, signature, args):
            return _call(builder, name, f32x16.llvm, *args)

        return f32x16(f32x16, f32x16), codegen

    function.__doc__ = doc
    return function


maximum = _binary("llvm.maxnum.v16f32", "The larger of two lanes; a NaN gives the other.")
minimum = _binary("llvm.minnum.v16f32", "The smaller of two lanes; a NaN gives the other.")


@intrinsic
def zero_below(typingctx, x, limit, value):
    """`value` where `x >= limit`, else 0; a NaN in `x` lets `value` through."""

    def codegen(context, builder, signature, args):
        low = builder.fcmp_ordered("<", args[0], args[1])
        return builder.select(low, f32x16.constant(0.0), args[2])

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def all_finite(typingctx, x):
    """Whether no lane is NaN or infinite."""

    def codegen(context, builder, signature, args):
        size = _call(builder, "llvm.fabs.v16f32", f32x16.llvm, args[0])
        # ordered: false for NaN
        finite = builder.fcmp_ordered("<", size, f32x16.constant(float("inf")))
        mask = builder.bitcast(finite, _I16)
        return builder.icmp_unsigned("==", mask, ir.Constant(_I16, 0xFFFF))

    return types.boolean(f32x16), codegen


@intrinsic
def reduce_add(typingctx, x):
    """The sum of the lanes, added pairwise in a fixed order."""

    def codegen(context, builder, signature, args):
        value, n = args[0], LANES
        while n > 1:
            n //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            low, high = (
                builder.shuffle_vector(
                    value, undefined, ir.Constant(ir.VectorType(_I32, n), list(lanes))
                )
                for lanes in (range(n), range(n, 2 * n))
            )
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return types.float32(f32x16), codegen


# integers


@intrinsic
def to_f32(typingctx, x):
    """Integer lanes as float32."""

    def codegen(context, builder, signature, args):
        convert = builder.sitofp if x.signed else builder.uitofp
        return convert(args[0], f32x16.llvm)

    return f32x16(x), codegen


@intrinsic(prefer_literal=True)
def field(typingctx, x, shift, width):
    """Bits `shift .. shift + width - 1` of each unsigned lane; both are literals."""
    low, size = shift.literal_value, width.literal_value

    def codegen(context, builder, signature, args):
        value = args[0]
        if low:
            value = builder.lshr(value, x.constant(low))
        if low + size < 8:
            value = builder.and_(value, x.constant((1 << size) - 1))
        return value

    return x(x, shift, width), codegen


@intrinsic(prefer_literal=True)
def shift_left(typingctx, x, count):
    """Unsigned byte lanes shifted left by a literal."""
    n = count.literal_value

    def codegen(context, builder, signature, args):
        return builder.shl(args[0], x.constant(n))

    return x(x, count), codegen


@intrinsic
def shift_right(typingctx, x, count):
    """Unsigned byte lanes shifted right by a run-time count of 0 to 7."""

    def codegen(context, builder, signature, args):
        return builder.lshr(args[0], _splat(builder, builder.trunc(args[1], _I8)))

    return u8x16(u8x16, types.intp), codegen


@intrinsic(prefer_literal=True)
def lookup(typingctx, x, table):
    """`table[x]` for byte lanes 0..15; `table` is a literal tuple of 16 signed bytes (global).

    An extract/insert chain over a constant vector, which LLVM turns into one byte shuffle.
    """
    raise_if = not isinstance(table, types.BaseTuple) or table.count != LANES
    if raise_if:
        return None

    def codegen(context, builder, signature, args):
        entries = cgutils.unpack_tuple(builder, args[1], LANES)
        vector = ir.Constant(u8x16.llvm, ir.Undefined)
        for i, entry in enumerate(entries):
            byte = builder.trunc(entry, _I8)
            vector = builder.insert_element(vector, byte, ir.Constant(_I32, i))
        result = ir.Constant(u8x16.llvm, ir.Undefined)
        for i in range(LANES):
            lane = ir.Constant(_I32, i)
            index = builder.zext(builder.extract_element(args[0], lane), _I32)
            byte = builder.extract_element(vector, index)
            result = builder.insert_element(result, byte, lane)
        return result

    return i8x16(u8x16, table), codegen


@intrinsic
def bit_set(typingctx, word, first):
    """16 lanes: bit `first + lane` of an int64 word, as 0 or 1 in a byte."""

    def codegen(context, builder, signature, args):
        shifted = builder.lshr(args[0], args[1])
        bits = builder.bitcast(builder.trunc(shifted, _I16), ir.VectorType(_I1, LANES))
        return builder.zext(bits, u8x16.llvm)

    return u8x16(types.intp, types.intp), codegen


@intrinsic
def float_from_bits(typingctx, bits):
    """The float32 whose bits are the low 32 bits of an int64."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], _I32), _F32)

    return types.float32(types.intp), codegen
