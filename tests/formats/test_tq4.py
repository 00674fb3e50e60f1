"""The tq formats: levels that Lloyd and Max's conditions confirm, and lengths that are kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv.formats import tq3, tq4

KINDS = [tq4.FORMAT, tq3.FORMAT]


def density(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x):
    return (1 + math.erf(x / math.sqrt(2))) / 2


@pytest.mark.parametrize("format_", KINDS, ids=lambda f: f.name)
def test_each_level_is_the_mean_of_what_is_nearest_to_it(format_):
    levels = format_.levels
    assert len(levels) == 2**format_.bits
    middles = [(a + b) / 2 for a, b in zip(levels, levels[1:], strict=False)]
    ends = [-math.inf, *middles, math.inf]
    error = 1.0
    for level, low, high in zip(levels, ends, ends[1:], strict=False):
        share = below(high) - below(low)
        # the mean of a normal distribution cut off at both sides; the levels have four digits, and
        # two neighbours' rounding moves a cell's mean by less than that again
        mean = (density(low) - density(high)) / share
        assert level == pytest.approx(mean, abs=1.5e-4)
        error -= share * (2 * mean - level) * level
    # as Max's table has it
    assert error == pytest.approx({4: 0.009497, 3: 0.03454}[format_.bits], abs=1e-5)


def direct(x, levels):
    """The nearest level of each, by looking at all; f64 throughout."""
    length = math.sqrt(sum(float(v) ** 2 for v in x))
    unit = x.astype(float) * math.sqrt(len(x)) / length
    distance = np.abs(unit[:, None] - np.array(levels))
    return distance.argmin(1), np.sort(distance, 1), length


@pytest.mark.parametrize("format_", KINDS, ids=lambda f: f.name)
@pytest.mark.parametrize("d", [32, 72, 128])
def test_codes_are_the_nearest_levels_and_the_scale_keeps_the_length(format_, d):
    rng = np.random.default_rng(d)
    x = rng.standard_normal((50, d)) * 10.0 ** rng.uniform(-4, 4, (50, 1))
    x = x.astype(np.float32)
    codes, (scale,) = format_.quantize(x)
    for row, own, s in zip(x, codes, scale, strict=True):
        nearest, distance, length = direct(row, format_.levels)
        # float32 decides between two levels that are this near to equally far
        clear = distance[:, 1] - distance[:, 0] > 1e-5
        assert clear.mean() > 0.99
        np.testing.assert_array_equal(own[clear], nearest[clear])
        decoded = math.sqrt(sum(format_.levels[c] ** 2 for c in own))
        assert s[0] == pytest.approx(length / decoded, rel=2.0**-22)


@pytest.mark.parametrize("format_", KINDS, ids=lambda f: f.name)
def test_of_two_equally_near_levels_the_upper_one(format_):
    codes, (scale,) = format_.quantize(np.zeros((1, 32), np.float32))
    assert codes.tolist() == [[2 ** (format_.bits - 1)] * 32]
    assert scale == 0


@st.composite
def pages(draw):
    """f32 [64, d] up to 30,000: large and small vectors, full ones and such of few entries."""
    d = draw(st.sampled_from([1, 32, 40, 128]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((64, d)) * 10.0 ** draw(st.integers(-9, 3))
    if draw(st.booleans()):
        x *= rng.random((64, d)) < 0.1
    if draw(st.booleans()):
        x[:, 0] = draw(st.floats(-30000, 30000, width=32))
    return np.clip(x, -30000, 30000).astype(np.float32)


@pytest.mark.parametrize("format_", KINDS, ids=lambda f: f.name)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(x=pages())
def test_a_page_keeps_lengths_and_signs(format_, x):
    d = x.shape[1]
    length = np.sqrt((x.astype(float) ** 2).sum(1))
    # the scale is rounded to a half float, of which the smallest is 2**-24; float32 adds 2**-22
    most = length * (2.0**-11 + 2.0**-22) + 2.0**-25 * format_.levels[-1] * math.sqrt(d)
    for back in (
        format_.decode_keys(format_.encode_keys(x), d),
        format_.decode_values(format_.encode_values(x), d),
    ):
        assert (np.abs(np.sqrt((back.astype(float) ** 2).sum(1)) - length) <= most).all()
        assert (back * np.sign(x) >= 0).all()
        # equal lengths and equal signs are never further apart than two edges of a square
        error = np.sqrt(((back - x.astype(float)) ** 2).sum(1))
        assert (error <= math.sqrt(2) * length + most).all()


@pytest.mark.parametrize(("format_", "most"), [(tq4.FORMAT, 0.0095), (tq3.FORMAT, 0.0345)])
@pytest.mark.parametrize("d", [64, 128])
def test_turned_vectors_err_by_no_more_than_the_levels_do(format_, most, d):
    rng = np.random.default_rng(d)
    # one huge value somewhere, and what a random orthogonal matrix makes of it
    x = rng.standard_normal((512, d))
    x[np.arange(512), rng.integers(d, size=512)] += 30
    turn, _ = np.linalg.qr(rng.standard_normal((d, d)))
    x = (x @ turn).astype(np.float32)
    error = ((format_.dequantize(*format_.quantize(x)) - x) ** 2).sum() / (x**2).sum()
    # a vector's channels have thinner tails than the normal distribution that the levels fit: their
    # kurtosis is smaller by 6 / (d + 2), 9 % at 64
    assert 0.9 * most < error < most
