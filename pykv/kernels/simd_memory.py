"""Moving sixteen lanes, or one value, between memory and registers; addresses are integers.

Half floats go through integer arithmetic where the CPU cannot convert them: LLVM would call a
function that Numba does not have.
"""

# The bodies of intrinsics are code generators: Numba finds their arguments by position, and
# `typingctx` is its convention.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pykv.kernels.simd import (
    _F16,
    _F32,
    _I1,
    _I8,
    _I16,
    _I32,
    _I64,
    LANES,
    Vector,
    _load,
    _splat,
    _store,
    f32x16,
    i8x16,
    u8x16,
)

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


@intrinsic
def half_of(typingctx, x):
    """A float32 rounded to a half float, and back."""

    def codegen(context, builder, signature, args):
        return _widen_half(context, builder, _narrow_to_half(context, builder, args[0]))

    return types.float32(types.float32), codegen


@intrinsic
def float_bits(typingctx, x):
    """The bits of a float32, as a non-negative int64."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.bitcast(args[0], _I32), _I64)

    return types.intp(types.float32), codegen


@intrinsic
def keep_lanes(typingctx, x, address, other):
    """`x` in the lanes whose bit is set in the 16 bits at an address, else the scalar `other`."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(_load(builder, args[1], _I16), ir.VectorType(_I1, LANES))
        return builder.select(bits, args[0], _splat(builder, args[2]))

    return f32x16(f32x16, types.intp, types.float32), codegen
