"""fp8_e4m3 cache pages for the GPU: layout in formats/fp8_e4m3.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 8, "head", "head", 0


@device
def level(code, extra):
    """The float8; its bits are moved into those of a float16, 256 times smaller."""
    return ((code & 127) << 7 | (code & 128) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(
        tl.float32
    ) * 256.0


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The head's own scale."""
    scale = tl.load(extra) + tl.zeros_like(tl.sum(x, 1, keep_dims=True))
    return scale, scale, scale


@device
def nearest_float8(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The nearest float8 of y, of two the even one; too large ones become the largest."""
    bits = y.to(tl.int32, bitcast=True)
    sign, size = bits >> 31 & 1, bits & 0x7FFFFFFF
    exponent = (size >> 23) - 127
    mantissa = size & 0x7FFFFF | 0x800000  # in units of 2 ** (exponent - 23)
    # bits that fall off: more of them below the smallest normal number
    drop = tl.minimum(23 - MANTISSA + tl.maximum(1 - BIAS - exponent, 0), 26)
    kept, rest, middle = mantissa >> drop, mantissa & ((1 << drop) - 1), 1 << (drop - 1)
    kept += ((rest > middle) | ((rest == middle) & (kept & 1 == 1))).to(tl.int32)
    found = tl.minimum(tl.maximum(exponent + (BIAS - 1), 0) * (1 << MANTISSA) + kept, LARGEST)
    return tl.where(drop < 26, found, 0) | sign << 7


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """The nearest float8 of x / scale."""
    return nearest_float8(tl.div_rn(x, scale + tl.zeros_like(x)), 3, 7, 0x7E)
