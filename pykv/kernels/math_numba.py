"""exp on sixteen lanes, and what is built on it.

Source: the polynomial of Cephes' expf (relative error under 2e-7).
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.jit_numba import device
from pykv.kernels.simd import (
    divide,
    fma,
    maximum,
    minimum,
    nearest,
    power_of_two,
    splat,
    to_i32,
    zero_below,
)

f = np.float32
LOWEST = np.float32(-87.0)  # e**x is a normal float32 from here up


@device
def exp16(x):
    """e**x on 16 lanes: 0 below -87, e**88 above 88."""
    y = minimum(maximum(x, splat(LOWEST)), splat(f(88.0)))
    n = nearest(y * f(1.44269504))
    r = fma(n, splat(f(-0.693359375)), y)
    r = fma(n, splat(f(2.12194440e-4)), r)
    p = splat(f(1.9875691500e-4))
    p = fma(p, r, splat(f(1.3981999507e-3)))
    p = fma(p, r, splat(f(8.3334519073e-3)))
    p = fma(p, r, splat(f(4.1665795894e-2)))
    p = fma(p, r, splat(f(1.6666665459e-1)))
    p = fma(p, r, splat(f(5.0000001201e-1)))
    p = fma(p, r * r, r) + f(1.0)
    return zero_below(x, splat(LOWEST), p * power_of_two(to_i32(n)))


@device
def sigmoid16(x):
    """1 / (1 + e**-x) on 16 lanes."""
    one = splat(f(1.0))
    return divide(one, one + exp16(splat(f(0.0)) - x))
