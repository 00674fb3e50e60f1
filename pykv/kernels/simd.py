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


# half floats


def _has_half_floats(context) -> bool:
    """Whether the target converts half floats itself (x86 without F16C cannot)."""
    triple, _, features = context.codegen().magic_tuple()
    return "+f16c" in features.split(",") or triple.startswith(("aarch64", "arm64"))


def _int(bits: ir.Type, like: ir.Type) -> ir.Type:
    return ir.VectorType(bits, like.count) if isinstance(like, ir.VectorType) else bits


def _const(kind: ir.Type, value: int) -> ir.Constant:
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def _widen_half(context, builder, bits):
    """i16 (or a vector of them), the bits of half floats, to float32."""
    half = _int(_F16, bits.type)
    result = _int(_F32, bits.type)
    if _has_half_floats(context):
        return builder.fpext(builder.bitcast(bits, half), result)
    # exponent and mantissa are moved up and scaled by 2**112, which handles subnormals as well;
    # infinity and NaN, whose exponent is all ones, get all ones again
    wide = _int(_I32, bits.type)
    x = builder.zext(bits, wide)
    sign = builder.shl(builder.and_(x, _const(wide, 0x8000)), _const(wide, 16))
    magnitude = builder.shl(builder.and_(x, _const(wide, 0x7FFF)), _const(wide, 13))
    scale = builder.bitcast(_const(wide, 0x77800000), result)
    scaled = builder.bitcast(builder.fmul(builder.bitcast(magnitude, result), scale), wide)
    special = builder.icmp_unsigned(">=", magnitude, _const(wide, 0x0F800000))
    ones = builder.or_(magnitude, _const(wide, 0x7F800000))
    return builder.bitcast(builder.or_(builder.select(special, ones, scaled), sign), result)


def _narrow_to_half(context, builder, value):
    """float32 (or a vector) to the bits of half floats, rounded to nearest even."""
    bits = _int(_I16, value.type)
    if _has_half_floats(context):
        return builder.bitcast(builder.fptrunc(value, _int(_F16, value.type)), bits)
    wide = _int(_I32, value.type)
    x = builder.bitcast(value, wide)
    sign = builder.lshr(builder.and_(x, _const(wide, 0x80000000)), _const(wide, 16))
    a = builder.and_(x, _const(wide, 0x7FFFFFFF))
    # normal: add half of the last kept bit (less one when that bit is even), then shift
    odd = builder.and_(builder.lshr(a, _const(wide, 13)), _const(wide, 1))
    rounded = builder.add(builder.add(a, _const(wide, 0xFFF)), odd)
    normal = builder.lshr(builder.sub(rounded, _const(wide, 112 << 23)), _const(wide, 13))
    # subnormal: adding 0.5 aligns the mantissa so that the FPU rounds at the right bit
    magic = _const(wide, 126 << 23)
    shifted = builder.fadd(builder.bitcast(a, value.type), builder.bitcast(magic, value.type))
    subnormal = builder.sub(builder.bitcast(shifted, wide), magic)
    finite = builder.select(
        builder.icmp_unsigned("<", a, _const(wide, 113 << 23)), subnormal, normal
    )
    too_large = builder.icmp_unsigned(">=", a, _const(wide, 0x477FF000))
    not_a_number = builder.icmp_unsigned(">", a, _const(wide, 0x7F800000))
    result = builder.select(too_large, _const(wide, 0x7C00), finite)
    result = builder.select(not_a_number, _const(wide, 0x7E00), result)
    return builder.trunc(builder.or_(result, sign), bits)


# loads


def _loader(result, lane, convert, doc):
    """An intrinsic that loads sixteen lanes, or one, of `lane` and converts what it read."""

    @intrinsic
    def load(typingctx, address):
        many = isinstance(result, Vector)

        def codegen(context, builder, signature, args):
            read = _load(builder, args[0], ir.VectorType(lane, LANES) if many else lane)
            return convert(context, builder, read)

        return result(types.intp), codegen

    load.__doc__ = doc
    return load


def _same(context, builder, value):
    return value


def _widen_bf16(context, builder, bits):
    wide = _int(_I32, bits.type)
    moved = builder.shl(builder.zext(bits, wide), _const(wide, 16))
    return builder.bitcast(moved, _int(_F32, bits.type))


def _sign_extend(context, builder, value):
    return builder.sext(value, _I64)


def _zero_extend(context, builder, value):
    return builder.zext(value, _I64)


load_f32 = _loader(f32x16, _F32, _same, "Sixteen float32.")
load_f16 = _loader(f32x16, _I16, _widen_half, "Sixteen half floats, as float32.")
load_bf16 = _loader(f32x16, _I16, _widen_bf16, "Sixteen bfloat16, as float32.")
load_u8 = _loader(u8x16, _I8, _same, "Sixteen unsigned bytes.")
load_i8 = _loader(i8x16, _I8, _same, "Sixteen signed bytes.")
scalar_f32 = _loader(types.float32, _F32, _same, "One float32.")
scalar_f16 = _loader(types.float32, _I16, _widen_half, "One half float, as float32.")
scalar_bf16 = _loader(types.float32, _I16, _widen_bf16, "One bfloat16, as float32.")
scalar_i64 = _loader(types.intp, _I64, _same, "One int64.")
scalar_i32 = _loader(types.intp, _I32, _sign_extend, "One int32, as int64.")
scalar_u32 = _loader(types.intp, _I32, _zero_extend, "One uint32, as int64.")
scalar_u16 = _loader(types.intp, _I16, _zero_extend, "One uint16, as int64.")
scalar_i8 = _loader(types.intp, _I8, _sign_extend, "One signed byte, as int64.")
scalar_u8 = _loader(types.intp, _I8, _zero_extend, "One unsigned byte, as int64.")


# stores


def _storer(source, convert, doc):
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            _store(builder, convert(context, builder, args[1]), args[0])
            return context.get_dummy_value()

        return types.void(types.intp, source), codegen

    store.__doc__ = doc
    return store


def _narrow_to_bf16(context, builder, value):
    """Rounded to nearest even; a NaN stays one."""
    wide = _int(_I32, value.type)
    x = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(x, _const(wide, 16)), _const(wide, 1))
    rounded = builder.add(builder.add(x, _const(wide, 0x7FFF)), odd)
    magnitude = builder.and_(x, _const(wide, 0x7FFFFFFF))
    not_a_number = builder.icmp_unsigned(">", magnitude, _const(wide, 0x7F800000))
    quiet = builder.or_(x, _const(wide, 0x00400000))
    kept = builder.select(not_a_number, quiet, rounded)
    return builder.trunc(builder.lshr(kept, _const(wide, 16)), _int(_I16, value.type))


def _low_byte(context, builder, value):
    return builder.trunc(value, _I8)


store_f32 = _storer(f32x16, _same, "Sixteen float32.")
store_f16 = _storer(f32x16, _narrow_to_half, "Sixteen float32, as half floats.")
store_bf16 = _storer(f32x16, _narrow_to_bf16, "Sixteen float32, as bfloat16.")
put_f32 = _storer(types.float32, _same, "One float32.")
put_f16 = _storer(types.float32, _narrow_to_half, "One float32, as a half float.")
put_bf16 = _storer(types.float32, _narrow_to_bf16, "One float32, as bfloat16.")
put_i64 = _storer(types.intp, _same, "One int64.")
put_u8 = _storer(types.intp, _low_byte, "The low byte of an int64.")


@intrinsic
def widen_four(typingctx, target, source):
    """Four half floats at `source`, as four float32 at `target`."""

    def codegen(context, builder, signature, args):
        bits = _load(builder, args[1], ir.VectorType(_I16, 4))
        _store(builder, _widen_half(context, builder, bits), args[0])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def stack(typingctx, size):
    """The address of `size` (a literal) bytes on the stack, for the whole call."""
    count = size.literal_value

    def codegen(context, builder, signature, args):
        # not cgutils.alloca_once: it fills the block with zeros, one store for each byte
        with builder.goto_entry_block():
            block = builder.alloca(ir.ArrayType(_I8, count))
        block.align = 64
        return builder.ptrtoint(block, _I64)

    return types.intp(size), codegen


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
    """Add `amount` to the int64 at `address` in one step; returns what stood there."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), args[1], "acq_rel")

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
def pause(typingctx):
    """Tell the core that this thread waits in a loop (x86; elsewhere nothing)."""

    def codegen(context, builder, signature, args):
        if context.codegen().magic_tuple()[0].startswith("x86_64"):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at `address`, which need not be mapped."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, args[0], _I8)
        hints = [ir.Constant(_I32, n) for n in (0, 3, 1)]  # read, keep, data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *hints)
        return context.get_dummy_value()

    return types.void(types.intp), codegen
