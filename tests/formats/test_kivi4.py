"""The rule of the kivi formats worked by Python, number by number."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.formats import kivi2, kivi3, kivi4

KINDS = [kivi4.FORMAT, kivi3.FORMAT, kivi2.FORMAT]
FORMAT = kivi4.FORMAT


def by_hand(x, most):
    """Codes, scale and minimum of one group: both rounded first, then a true division."""
    f = np.float32
    m = np.float16(min(x))
    s = np.float16((f(max(x)) - f(m)) / f(most))
    if s == 0:
        return [0] * len(x), float(s), float(m)
    quotients = [float(f(f(v) - f(m)) / f(s)) for v in x]
    return [max(0, min(most, round(q))) for q in quotients], float(s), float(m)


def some_groups(n, most):
    """f32 [n, 32] of every size, around zero and not, many values on ties between two codes."""
    rng = np.random.default_rng(most)
    x = (rng.standard_normal((n, 32)) + rng.choice([0, 3, -20], (n, 1))).astype(np.float16)
    x = x.astype(np.float32)
    m = x.min(-1, keepdims=True)
    s = ((x.max(-1, keepdims=True) - m) / most).astype(np.float16).astype(np.float32)
    ties = m + (rng.integers(0, most, (n, 32)) + np.float32(0.5)) * s
    x = np.where(rng.random((n, 32)) < 0.6, x, ties).astype(np.float32)
    x[::5] += rng.standard_normal((len(x[::5]), 32)).astype(np.float32) / 100  # no half floats
    return x * (2.0 ** rng.integers(-24, 11, (n, 1))).astype(np.float32)


@pytest.mark.parametrize("format_", KINDS, ids=lambda f: f.name)
def test_codes_and_parameters_follow_the_rule(format_):
    most = 2**format_.bits - 1
    x = some_groups(200, most)
    codes, (scale, minimum) = format_.quantize(x)
    for row, own, s, m in zip(x, codes, scale, minimum, strict=True):
        expected, expected_s, expected_m = by_hand(row, most)
        assert (s[0], m[0]) == (expected_s, expected_m)
        assert own.tolist() == expected


def test_halves_go_to_even():
    x = np.array([-3, 12, -2.5, -1.5, -0.5, 11.5], np.float32)  # steps of 1 from -3
    codes, (scale, minimum) = FORMAT.quantize(x)
    assert (scale, minimum) == (1, -3)
    assert codes.tolist() == [0, 15, 0, 2, 2, 14]


def test_codes_count_from_the_rounded_minimum_by_the_rounded_scale():
    # 2049 is 2048 as a half float; (2063 - 2048) / 15 is 1, where the true range would give 14 / 15
    codes, (scale, minimum) = FORMAT.quantize(np.array([2049, 2063, 2050.4], np.float32))
    assert (scale, minimum) == (1, 2048)
    assert codes.tolist() == [1, 15, 2]


@pytest.mark.parametrize("format_", KINDS, ids=lambda f: f.name)
def test_a_constant_group_of_half_floats_is_exact(format_):
    x = np.repeat(np.float32([0, 1, -7.25, 65504, -65504, 2.0**-24])[:, None], 32, 1)
    codes, (scale, minimum) = format_.quantize(x)
    assert not codes.any()
    assert not scale.any()
    np.testing.assert_array_equal(format_.dequantize(codes, (scale, minimum)), x)


@pytest.mark.parametrize("format_", KINDS, ids=lambda f: f.name)
def test_a_constant_group_beside_the_half_floats_errs_by_the_scale_s_rounding(format_):
    # 1 + 2**-12 rounds down to 1, and 1 - 2**-13 up to it: a positive and a negative scale
    for value in (1 + 2.0**-12, 1 - 2.0**-13):
        x = np.full((1, 32), value, np.float32)
        back = format_.dequantize(*format_.quantize(x))
        # the scale is a denormal half float
        np.testing.assert_allclose(back, x, rtol=0, atol=(2**format_.bits - 1) * 2.0**-25)


@pytest.mark.parametrize("format_", KINDS, ids=lambda f: f.name)
def test_an_outlier_costs_one_channel_of_32_keys_or_32_channels_of_one_value(format_):
    x = np.random.default_rng(2).standard_normal((64, 72)).astype(np.float16).astype(np.float32)
    spoilt = x.copy()
    spoilt[40, 5] = 60000
    keys = [format_.decode_keys(format_.encode_keys(v), 72) for v in (x, spoilt)]
    changed = np.zeros((64, 72), bool)
    changed[32:, 5] = True
    assert not (keys[0] != keys[1])[~changed].any()
    # the rest of the group has the code 0, which is its minimum
    rest = np.delete(spoilt[32:, 5], 8)
    np.testing.assert_array_equal(np.delete(keys[1][32:, 5], 8), np.full(31, rest.min()))
    values = [format_.decode_values(format_.encode_values(v), 72) for v in (x, spoilt)]
    changed = np.zeros((64, 72), bool)
    changed[40, :32] = True
    assert not (values[0] != values[1])[~changed].any()


@pytest.mark.parametrize(
    ("format_", "within"), [(kivi4.FORMAT, 0.01), (kivi3.FORMAT, 0.01), (kivi2.FORMAT, 0.02)]
)
def test_the_mean_error_is_that_of_even_steps(format_, within):
    x = np.random.default_rng(3).standard_normal((8192, 32)).astype(np.float32)
    codes, (scale, minimum) = format_.quantize(x)
    error = ((format_.dequantize(codes, (scale, minimum)) - x) ** 2).mean(dtype=float)
    # evenly spread over a step, but for the two ends, which have none to speak of
    steps = (scale.astype(float) ** 2).mean() / 12 * 30 / 32
    assert error == pytest.approx(steps, rel=within)
