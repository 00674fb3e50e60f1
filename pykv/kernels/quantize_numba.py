"""Choosing codes, one group of values at a time: what several formats share.

All take the n float32 at `x + i * step`, and write a code, a byte each, to `codes + i * code_step`.
No operation is fused or reordered: a code must be the one that the NumPy codec chooses.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.jit_numba import device
from pykv.kernels.simd_memory import put_u8, scalar_f32

f = np.float32
INFINITE = np.float32(3.4028234663852886e38)


@device
def extreme(x, step, n):
    """The value of largest magnitude; the first of two."""
    top = scalar_f32(x)
    for i in range(1, n):
        v = scalar_f32(x + i * step)
        if abs(v) > abs(top):
            top = v
    return top


@device
def limits(x, step, n):
    """The smallest and the largest value."""
    low = high = scalar_f32(x)
    for i in range(1, n):
        v = scalar_f32(x + i * step)
        low, high = min(low, v), max(high, v)
    return low, high


@device
def reciprocal(d):
    """1 / d, and 0 where that is not a finite float32."""
    inverse = f(1) / d
    return inverse if abs(inverse) <= INFINITE else f(0)


@device
def centred(x, step, n, codes, code_step, half):
    """Codes 0 to 2 * half - 1 around `half`; the value of largest magnitude gets 0.  The scale."""
    d = extreme(x, step, n) * (f(-1) / half)
    inverse = reciprocal(d)
    for i in range(n):
        v = scalar_f32(x + i * step) * inverse + (half + f(0.5))
        put_u8(codes + i * code_step, int(min(v, f(2) * half - f(1))))
    return d, f(0)


@device
def counted(x, step, n, codes, code_step, most):
    """Codes 0 to `most`, counted from the smallest value before it is rounded.  Scale, minimum."""
    low, high = limits(x, step, n)
    d = (high - low) / most
    inverse = reciprocal(d)
    for i in range(n):
        v = (scalar_f32(x + i * step) - low) * inverse + f(0.5)
        put_u8(codes + i * code_step, int(min(v, most)))
    return d, low
