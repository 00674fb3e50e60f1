"""The SIMD values against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from launch import launch

from pykv.kernels import simd_memory
from pykv.kernels.simd import (
    absolute,
    all_finite,
    bit_set,
    divide,
    field,
    float_from_bits,
    fma,
    lookup,
    maximum,
    minimum,
    nearest,
    power_of_two,
    reduce_add,
    reduce_max,
    shift_left,
    shift_right,
    splat,
    to_f32,
    to_i32,
    zero_below,
)
from pykv.kernels.simd_group import (
    add_products,
    add_row_products,
    add_scaled_products,
    load_group,
    store_group,
    zeros,
)
from pykv.kernels.simd_memory import (
    load_bf16,
    load_f16,
    load_f32,
    load_u8,
    put_bf16,
    put_f16,
    put_f32,
    put_i64,
    put_u8,
    scalar_bf16,
    scalar_f16,
    scalar_f32,
    scalar_i8,
    scalar_i32,
    scalar_i64,
    scalar_u8,
    scalar_u16,
    scalar_u32,
    store_bf16,
    store_f16,
    store_f32,
    widen_four,
)

f = np.float32
MOST = np.finfo(np.float32).max
SPECIAL = np.array(
    [0, -0.0, 1, -1, 65504, 65519.996, 65520, -65520, 1e30, -1e30, MOST, np.inf, -np.inf, np.nan,
     -np.nan, 2.0**-14, 2.0**-24, 2.0**-25, 1.0000001 * 2.0**-25, 3 * 2.0**-25, 2.0**-26, 1e-45,
     -1e-45, 2.0**-126, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.3961776e38],
    np.float32,
)  # fmt: skip


@pytest.fixture(params=["hardware", "integers"])
def halves(request, monkeypatch):
    """The name of a way to convert half floats, in force."""
    if request.param == "integers":
        monkeypatch.setattr(simd_memory, "_has_half_floats", lambda context: False)
    return request.param


# ctx: x u16, n, as f16 by sixteens, by one, by fours; as bf16 by sixteens, by one
def widen(ctx, task, worker):
    x, n = scalar_i64(ctx), scalar_i64(ctx + 8)
    for i in range(0, n, 16):
        store_f32(scalar_i64(ctx + 16) + i * 4, load_f16(x + i * 2))
        store_f32(scalar_i64(ctx + 40) + i * 4, load_bf16(x + i * 2))
    for i in range(n):
        put_f32(scalar_i64(ctx + 24) + i * 4, scalar_f16(x + i * 2))
        put_f32(scalar_i64(ctx + 48) + i * 4, scalar_bf16(x + i * 2))
    for i in range(0, n, 4):
        widen_four(scalar_i64(ctx + 32) + i * 4, x + i * 2)


# ctx: x f32, n, f16 by sixteens, by one; bf16 by sixteens, by one
def narrow(ctx, task, worker):
    x, n = scalar_i64(ctx), scalar_i64(ctx + 8)
    for i in range(0, n, 16):
        store_f16(scalar_i64(ctx + 16) + i * 2, load_f32(x + i * 4))
        store_bf16(scalar_i64(ctx + 32) + i * 2, load_f32(x + i * 4))
    for i in range(n):
        put_f16(scalar_i64(ctx + 24) + i * 2, scalar_f32(x + i * 4))
        put_bf16(scalar_i64(ctx + 40) + i * 2, scalar_f32(x + i * 4))


def assert_same(got, expected):
    """Bit for bit, but that a NaN need only be one."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])


def widen_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bf16(x):
    """To nearest, ties to even, by looking at both neighbours."""
    bits = x.view(np.uint32)
    down, up = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    with np.errstate(invalid="ignore", over="ignore"):
        low = np.abs(x.astype(np.float64) - down.view(np.float32))
        # the neighbour beyond the largest is 2**128, which float32 writes as infinity
        above = np.where(
            np.isinf(up.view(np.float32)), np.copysign(2.0**128, x.astype(np.float64)), up.view(f)
        )
        high = np.abs(above - x.astype(np.float64))
    odd = bits >> 16 & 1
    return np.where((high < low) | ((high == low) & (odd == 1)), up, down) >> 16


def test_every_half_widens(halves):
    x = np.arange(65536, dtype=np.uint16)
    outs = [np.full(len(x), 7, np.float32) for _ in range(5)]
    launch(widen, x, len(x), *outs, tag=halves)
    for out in outs[:3]:
        assert_same(out, x.view(np.float16).astype(np.float32))
    for out in outs[3:]:
        assert_same(out, widen_bf16(x))


def samples():
    """Float32 that are halves, bfloat16, the ties between them, their neighbours, and any bits."""
    half = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        ties = (half[:-1].astype(np.float64) + half[1:]).astype(np.float32) / 2
        bf16 = np.arange(0, 65536, 7, dtype=np.uint32) << 16 | 0x8000
        any_bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
        ordinary = np.random.default_rng(1).normal(0, 3, 50_000).astype(np.float32)
        x = np.concatenate(
            [half, ties, bf16.view(f), any_bits.view(f), ordinary, ordinary * f(1e-6), SPECIAL]
        )
        x = np.concatenate([x, *(np.nextafter(x, f(s * np.inf)) for s in (1, -1))])
    return np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])


def test_narrowing_rounds_to_nearest_even(halves):
    x = samples()
    outs = [np.full(len(x), 7, np.uint16) for _ in range(4)]
    launch(narrow, x, len(x), *outs, tag=halves)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    for out in outs[:2]:
        assert_same(out.view(np.float16), expected)
    finite = ~np.isnan(x)
    for out in outs[2:]:
        np.testing.assert_array_equal(np.isnan(widen_bf16(out)), ~finite)
        usual = finite & ~np.isinf(x)
        np.testing.assert_array_equal(out[usual], narrow_bf16(x)[usual])
        np.testing.assert_array_equal(widen_bf16(out[np.isinf(x)]), x[np.isinf(x)])


# ctx: x, y, z (f32 [n]), n, out f32 [11][n], whether finite u8 [n / 16], sums and maxima f32
def lanes(ctx, task, worker):
    n, out = scalar_i64(ctx + 24), scalar_i64(ctx + 32)
    row = n * 4
    for i in range(0, n, 16):
        x, y = load_f32(scalar_i64(ctx) + i * 4), load_f32(scalar_i64(ctx + 8) + i * 4)
        z, at = load_f32(scalar_i64(ctx + 16) + i * 4), out + i * 4
        store_f32(at, x + y)
        store_f32(at + row, x - y)
        store_f32(at + 2 * row, x * y)
        store_f32(at + 3 * row, divide(x, y))
        store_f32(at + 4 * row, fma(x, y, z))
        store_f32(at + 5 * row, maximum(x, y))
        store_f32(at + 6 * row, minimum(x, y))
        store_f32(at + 7 * row, zero_below(x, y, z))
        store_f32(at + 8 * row, nearest(x))
        store_f32(at + 9 * row, absolute(x))
        store_f32(at + 10 * row, x * f(3))
        put_u8(scalar_i64(ctx + 40) + i // 16, 1 if all_finite(x) else 0)
        put_f32(scalar_i64(ctx + 48) + i // 4, reduce_add(x))
        put_f32(scalar_i64(ctx + 56) + i // 4, reduce_max(x))


def test_lanewise_arithmetic():
    rng = np.random.default_rng(2)
    x, y, z = (rng.normal(0, 4, 1600).astype(np.float32) for _ in range(3))
    x[:29] = y[100:129] = SPECIAL
    x[200:400] = np.arange(200) / 2  # ties of nearest
    y[300:400] = x[300:400]
    out, finite = np.zeros((11, 1600), np.float32), np.zeros(100, np.uint8)
    sums, tops = np.zeros(100, np.float32), np.zeros(100, np.float32)
    launch(lanes, x, y, z, 1600, out, finite, sums, tops)
    with np.errstate(all="ignore"):
        exact = x.astype(np.float64) * y + z
        expected = [
            x + y, x - y, x * y, x / y, None, np.fmax(x, y), np.fmin(x, y), np.where(x < y, 0, z),
            np.rint(x), np.abs(x), x * f(3),
        ]  # fmt: skip
    for got, want in zip(out, expected, strict=True):
        if want is not None:
            np.testing.assert_array_equal(got, want)
    # the product is exact in float64, and the sum off by 2**-53 at most: one float32 rounding
    usual = np.isfinite(exact) & (np.abs(exact) < 1e30)
    np.testing.assert_allclose(out[4][usual], exact[usual], rtol=2.0**-24 + 2.0**-50, atol=1e-45)
    rows = x.reshape(100, 16)
    np.testing.assert_array_equal(finite, np.isfinite(rows).all(1))
    usual = np.isfinite(rows).all(1) & (np.abs(rows).max(1) < 1e30)
    np.testing.assert_array_equal(tops[usual], rows[usual].max(1))
    pairs = rows[usual]
    while pairs.shape[1] > 1:
        half = pairs.shape[1] // 2
        pairs = pairs[:, :half] + pairs[:, half:]
    np.testing.assert_array_equal(sums[usual], pairs[:, 0])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_all_finite_sees_every_lane(bad):
    x = np.full((17, 16), MOST, np.float32)
    x[np.arange(16), np.arange(16)] = bad
    x = x.ravel()
    out, finite, rest = (
        np.zeros((11, 272), np.float32),
        np.full(17, 9, np.uint8),
        np.zeros(17, "f4"),
    )
    launch(lanes, x, x, x, 272, out, finite, rest, rest.copy())
    assert finite.tolist() == [0] * 16 + [1]


TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# ctx: bytes u8 [256], out f32 [6][256], words i64 [4], bits u8 [4][16]
def bytes_and_bits(ctx, task, worker):
    out = scalar_i64(ctx + 8)
    for i in range(0, 256, 16):
        x, at = load_u8(scalar_i64(ctx) + i), out + i * 4
        store_f32(at, to_f32(field(x, 0, 4)))
        store_f32(at + 1024, to_f32(field(x, 4, 4)))
        store_f32(at + 2048, to_f32(field(x, 2, 2)))
        store_f32(at + 3072, to_f32(shift_left(x, 3)))
        store_f32(at + 4096, to_f32(shift_right(x, 5)))
        store_f32(at + 5120, to_f32(lookup(field(x, 0, 4), TABLE)))
    for i in range(4):
        word = scalar_i64(scalar_i64(ctx + 16) + i * 8)
        store_f32(scalar_i64(ctx + 24) + i * 64, to_f32(bit_set(word, i * 16)))


def test_bytes_bits_and_tables():
    x, out = np.arange(256, dtype=np.uint8), np.zeros((6, 256), np.float32)
    words = np.random.default_rng(3).integers(-(2**63), 2**63, 4)
    bits = np.zeros((4, 16), np.float32)
    launch(bytes_and_bits, x, out, words, bits)
    table = np.array(TABLE)
    expected = [x & 15, x >> 4, x >> 2 & 3, x << 3 & 255, x >> 5, table[x & 15]]
    np.testing.assert_array_equal(out, expected)
    lanes_ = np.arange(16)
    np.testing.assert_array_equal(bits, [w >> (16 * i + lanes_) & 1 for i, w in enumerate(words)])


# ctx: bytes, out i64 [6], out f32 [17]
def scalars(ctx, task, worker):
    x, out = scalar_i64(ctx), scalar_i64(ctx + 8)
    put_i64(out, scalar_i8(x))
    put_i64(out + 8, scalar_u8(x))
    put_i64(out + 16, scalar_u16(x))
    put_i64(out + 24, scalar_i32(x))
    put_i64(out + 32, scalar_u32(x))
    put_i64(out + 40, scalar_i64(x))
    put_f32(scalar_i64(ctx + 16), float_from_bits(scalar_u32(x)))
    store_f32(scalar_i64(ctx + 16) + 4, power_of_two(to_i32(splat(f(-3.7)))))


@pytest.mark.parametrize("value", [-2, 0x0102030405060788, 0x7FC00080BF800000])
def test_scalars(value):
    x, out, floats = np.array([value]), np.zeros(6, np.int64), np.zeros(17, np.float32)
    launch(scalars, x, out, floats)
    expected = [int(x.view(t)[0]) for t in ("i1", "u1", "u2", "i4", "u4", "i8")]
    assert out.tolist() == expected
    assert floats[:1].tobytes() == x.tobytes()[:4]
    assert floats[1:].tolist() == [2.0**-3] * 16


# ctx: a f32 [3] at a stride, x f32 [16], rows f32 [3][16], out f32 [4][3][16]
def groups(ctx, task, worker):
    a, x, out = scalar_i64(ctx), load_f32(scalar_i64(ctx + 8)), scalar_i64(ctx + 24)
    rows = scalar_i64(ctx + 16)
    start = load_group(zeros(3), rows, 64)
    store_group(out, 64, add_products(start, a, 20, x))
    store_group(out + 192, 64, add_scaled_products(start, a, 20, f(0.3), x))
    store_group(out + 384, 64, add_row_products(zeros(3), rows, 64, x))
    store_group(out + 576, 64, start)


def test_groups():
    rng = np.random.default_rng(5)
    a, x, rows = (rng.normal(0, 1, s).astype(np.float32) for s in ((3, 5), (16,), (3, 16)))
    out = np.zeros((4, 3, 16), np.float32)
    launch(groups, a, x, rows, out)
    first = a[:, :1].astype(np.float64)
    scaled = (a[:, :1] * f(0.3)).astype(np.float64)
    exact = [rows + first * x, rows + scaled * x, rows.astype(np.float64) * x, rows]
    # one rounding each
    np.testing.assert_allclose(out, exact, rtol=2.0**-24, atol=0)
