"""What holds for the pages of every format with codes: bounds of error, and ggml's own values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv import registry
from pykv.formats.coded import CodedFormat, HeadNumbers

FORMATS = {n: registry.find("formats", n, "cache type").FORMAT for n in registry.names("formats")}
CODED = [name for name, format_ in FORMATS.items() if isinstance(format_, CodedFormat)]
GGML = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
SIDES = ["key", "value"]


def numbers_of(name, side, d):
    """What a calibration file would say; levels include 0, and channels reach from -1 to 1."""
    format_ = FORMATS[name]
    if format_.calibration != "levels":
        return None
    middle = 2 ** (format_.bits - 1)
    levels = ((np.arange(2 * middle) - middle) / middle).astype(np.float32)
    if side == "value":
        return HeadNumbers(levels=levels)
    return HeadNumbers(np.ones(d, np.float32), np.zeros(d, np.float32), levels)


def round_trip(name, side, x):
    """What a page gives back."""
    format_, d = FORMATS[name], x.shape[1]
    numbers = numbers_of(name, side, d)
    if side == "key":
        return format_.decode_keys(format_.encode_keys(x, numbers), d, numbers=numbers)
    return format_.decode_values(format_.encode_values(x, numbers), d, numbers=numbers)


# bounds


def h(x):
    """The most that rounding to float16 moves a number: half a unit of its last place."""
    return np.maximum(np.abs(x) * 2.0**-11, 2.0**-25)


def uniform(levels, low, span):
    """A minimum and a step from it, rounded after the codes were chosen."""
    return span / levels / 2 + levels * h(span / levels) + h(low)


def kivi(levels, low, span):
    # the scale counts from the rounded minimum, so half a step may be longer by its rounding
    return uniform(levels, low, span) + h(low) / levels / 2


def around_zero(step, levels, peak):
    """Steps of `step` of the peak: the most that a value lies from a code, in value."""
    return peak * step + levels * h(peak / levels)


def in_levels(levels, low, high):
    """From the middle of a range to its ends; levels reach from -1 to 1 less a step, evenly."""
    centre = (low + high) / 2
    half = (high - low) / 2 + h(centre)  # as far as the end from the rounded middle
    # the range's upper end is a step from the last level, its lower end a level; a scale rounded
    # down, and then a code's product and sum, add the rest
    return half * 2 / levels + 2 * h(half) + h(centre)


BOUNDS = {  # x, least, most and 2-norm of the value's group, all f64 -> the docstring's bound
    "q8_0": lambda x, low, high, norm: around_zero(1 / 254, 127, np.maximum(high, -low)),
    "q5_1": lambda x, low, high, norm: uniform(31, low, high - low),
    "q5_0": lambda x, low, high, norm: around_zero(1 / 16, 16, np.maximum(high, -low)),
    "q4_1": lambda x, low, high, norm: uniform(15, low, high - low),
    "q4_0": lambda x, low, high, norm: around_zero(1 / 8, 8, np.maximum(high, -low)),
    # opposite to the extremum the table ends 14 of 127 steps early; refitting moves the scale by at
    # most max q|e| x^2 / q^2 x^2 < 1/8 over its entries q and their errors e: (14 + 113 / 8) / 127
    # is 0.222, and rounding the scale is far within the rest
    "iq4_nl": lambda x, low, high, norm: np.maximum(high, -low) / 4 + 127 * 2.0**-25,
    "int8": lambda x, low, high, norm: around_zero(1 / 254, 127, np.maximum(high, -low)),
    "kivi4": lambda x, low, high, norm: kivi(15, low, high - low),
    "kivi3": lambda x, low, high, norm: kivi(7, low, high - low),
    "kivi2": lambda x, low, high, norm: kivi(3, low, high - low),
    # of one value, as of all together; test_tq4.py has the bound of a vector
    "tq4": lambda x, low, high, norm: 2**0.5 * norm + 3 * 2.0**-25,
    "tq3": lambda x, low, high, norm: 2**0.5 * norm + 3 * 2.0**-25,
    "nuq4": lambda x, low, high, norm: in_levels(16, low, high),
    "nuq3": lambda x, low, high, norm: in_levels(8, low, high),
    "nuq2": lambda x, low, high, norm: in_levels(4, low, high),
    "fp8_e4m3": lambda x, low, high, norm: np.maximum(
        np.maximum(np.abs(x) / 16, 2.0**-10), np.abs(x) - 448
    ),
    "fp8_e5m2": lambda x, low, high, norm: np.maximum(
        np.maximum(np.abs(x) / 8, 2.0**-17), np.abs(x) - 57344
    ),
}


def groups(axis, d):
    """Each group of values that share a scale, as an index of [64, d] with the axis to reduce."""
    if axis == "channel":
        return [((slice(t, t + 32), slice(None)), 0) for t in (0, 32)]
    if axis == "block":
        return [((slice(None), slice(c, min(c + 32, d))), 1) for c in range(0, d, 32)]
    return [((slice(None), slice(None)), 1)]


def bound(name, side, x):
    """f64 [64, d]"""
    format_ = FORMATS[name]
    axis = format_.key_axis if side == "key" else format_.value_axis
    out, x = np.empty(x.shape), x.astype(float)
    for place, along in groups(axis, x.shape[1]):
        part = x[place]
        low, high = part.min(along, keepdims=True), part.max(along, keepdims=True)
        norm = np.sqrt((part**2).sum(along, keepdims=True))
        # what float32 adds: 4 roundings of 2**-24 each, of codes times a scale and of a minimum
        slack = (high - low + np.abs(low) + np.abs(high)) * 2.0**-21
        out[place] = BOUNDS[name](part, low, high, norm) + slack
    return out


def key_bound(name, x):
    """f64 [64, d]: channels from -1 to 1 of the numbers above, and what lies beyond."""
    step = 2.0 ** (1 - FORMATS[name].bits)
    return np.maximum(step, np.abs(x.astype(float)) - (1 - step)) + 2.0**-22


@st.composite
def pages(draw):
    """f32 [64, d] of a few values, zeros and denormals and the ends of float16 among them."""
    d = draw(st.sampled_from([1, 8, 32, 33, 40, 64]))
    numbers = st.floats(-65504, 65504, width=32)
    small = st.floats(-1, 1, width=32)
    pool = draw(st.lists(st.one_of(numbers, small), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.choice(np.array(pool, np.float32), (64, d))
    if draw(st.booleans()):
        x *= rng.uniform(-1, 1, (64, d)).astype(np.float32)
    if draw(st.booleans()):
        x *= np.float32(10.0 ** draw(st.integers(-44, 0)))
    if draw(st.booleans()):
        x[rng.integers(64), rng.integers(d)] = draw(st.sampled_from([65504, -65504, 1000]))
    return x


@pytest.mark.parametrize("name", BOUNDS)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(x=pages())
def test_no_value_errs_by_more_than_the_bound(name, x):
    for side in SIDES:
        back = round_trip(name, side, x)
        assert back.dtype == np.float32
        ranged = FORMATS[name].calibration == "levels" and side == "key"
        most = key_bound(name, x) if ranged else bound(name, side, x)
        excess = np.abs(back.astype(float) - x) - most
        assert excess.max() <= 0, (side, np.unravel_index(excess.argmax(), x.shape))


def test_every_format_with_codes_has_a_bound():
    assert set(BOUNDS) == set(CODED)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CODED)
def test_zeros_come_back_as_zeros(name, side):
    x = np.zeros((64, 40), np.float32)
    x[::2] = -0.0
    np.testing.assert_array_equal(round_trip(name, side, x), x)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CODED)
def test_what_no_half_float_holds_is_limited_and_never_nan(name, side):
    rng = np.random.default_rng(5)
    for size in (1e-45, 1e-40, 1e-30, 1e-18, 65504, 1e6, 1e10, 1e20, 1e30, 1e38):
        x = (rng.uniform(-1, 1, (64, 40)) * size).astype(np.float32)
        x[3, 7], x[:, 20] = size, -size
        back = round_trip(name, side, x)
        assert np.isfinite(back).all()
        assert (back[:, 20] <= 0).all()


# errors of normally distributed values

RELATIVE = {  # mean square error over mean square, measured with ggml's own quantisers and torch's
    "q8_0": 2.87e-5,
    "q5_1": 1.43e-3,
    "q5_0": 1.82e-3,
    "q4_1": 6.12e-3,
    "iq4_nl": 6.19e-3,
    "q4_0": 7.39e-3,
    "fp8_e4m3": 7.0e-4,
    "fp8_e5m2": 2.8e-3,
    "tq4": 9.5e-3,  # as J. Max's table of 1960 has it
    "tq3": 3.45e-2,
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", RELATIVE)
def test_the_mean_error_of_normal_values_is_the_known_one(name, side):
    # a wide head, for tq: a vector of 128 normal values over its own length has thinner tails
    x = np.random.default_rng(11).standard_normal((2, 64, 2048)).astype(np.float32)
    back = np.stack([round_trip(name, side, page) for page in x])
    error = ((back - x) ** 2).mean(dtype=float) / (x**2).mean(dtype=float)
    # 262,144 values give the mean to 0.5 %, and the figures have two or three digits
    assert error == pytest.approx(RELATIVE[name], rel=0.02)


# ggml's types against the gguf package


def values(seed, d, spread):
    """f32 [64, d] of every size, with ties, constants, signs of zero and whole groups of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((64, d)) * 10.0 ** rng.uniform(-spread, spread, (64, 1))
    x[1] = np.round(rng.standard_normal(d) * 4) / 8
    x[2], x[3], x[4] = 0, -0.0, 3.25
    x[5] = rng.choice([-1, 1], d)
    x[6] = np.arange(d) % 64 - 31.5
    x[7] = 0.1
    x[8, d // 2] = 60000
    return x.astype(np.float32)


@pytest.mark.parametrize("d", [32, 40, 72, 100, 128])
@pytest.mark.parametrize("name", GGML)
def test_pages_hold_what_ggml_blocks_hold(name, d):
    x = values(d, d, 3)
    # a short last block, filled up with its own last value: neither its extremum nor its range
    # changes, nor which value of largest magnitude is the first
    filled = np.pad(x, ((0, 0), (0, -d % 32)), mode="edge")
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(filled, kind), kind)[:, :d]
    for side in SIDES:
        np.testing.assert_array_equal(round_trip(name, side, x), expected)


@pytest.mark.parametrize("name", [*GGML, "iq4_nl"])
def test_pages_hold_what_rows_hold(name):
    x = values(1, 96, 3)
    expected = FORMATS[name].decode(FORMATS[name].encode(x))
    for side in SIDES:
        np.testing.assert_array_equal(round_trip(name, side, x), expected)
