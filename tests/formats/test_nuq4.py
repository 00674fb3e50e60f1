"""The nuq formats: codes, ranges and outliers, each found here value by value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pykv.errors import ConfigError, FormatError, UnsupportedError
from pykv.formats import nuq2, nuq3, nuq4
from pykv.formats.coded import HeadNumbers, find

PLAIN = [nuq4.FORMAT, nuq3.FORMAT, nuq2.FORMAT]
SPECS = [f"nuq{b}{option}" for b in (4, 3, 2) for option in ("", ":outliers=1%", ":outliers=2.5%")]
SHARES = {"": 0, "1%": 1, "2.5%": 2.5}
UNUSED = 0xFFFF


def levels_of(bits, seed=0):
    """Uneven and rising, from -1 to 1."""
    rng = np.random.default_rng((bits, seed))
    return np.sort(rng.uniform(-1, 1, 2**bits)).astype(np.float32)


def ranges(d, seed=0):
    rng = np.random.default_rng((d, seed))
    scale = rng.uniform(0.5, 2, d).astype(np.float32)
    return scale, rng.standard_normal(d).astype(np.float32)


def keys_and_numbers(spec, d, seed=1):
    format_, (scale, centre) = find(spec), ranges(d)
    x = centre + scale * np.random.default_rng((d, seed)).standard_normal((64, d)) * 0.6
    x = x.astype(np.float32)
    return format_, x, HeadNumbers(scale, centre, levels_of(format_.bits))


def values_and_numbers(spec, d, seed=1):
    format_ = find(spec)
    x = np.random.default_rng((d, seed)).standard_normal((64, d)) ** 3
    return format_, (x + 0.3).astype(np.float32), HeadNumbers(levels=levels_of(format_.bits))


def count_of(spec, d):
    share = SHARES[spec.partition("=")[2]]
    return math.ceil(share * 64 * d / 100)


def nearest(ratio, levels):
    """By looking at all levels; the upper one of two."""
    distance = np.abs(ratio[..., None].astype(float) - levels.astype(float))
    return distance.shape[-1] - 1 - distance[..., ::-1].argmin(-1), distance


def assert_codes(codes, ratio, levels):
    own, distance = nearest(ratio, levels)
    if (codes == own).all():
        return
    # float32 decides between two levels that are this near to equally far
    off = np.nonzero(codes != own)
    gap = np.take_along_axis(distance, codes[..., None].astype(int), -1)[..., 0] - distance.min(-1)
    assert gap[off].max() < 1e-6


def place_of(t, c, side):
    return c * 64 + t if side == "key" else (c // 32 * 64 + t) * 32 + c % 32


def chosen(distance, n, side):
    """Up to n tokens and channels with a distance above 0, the farthest and then first ones."""
    found = [
        (-distance[t, c], place_of(t, c, side), t, c) for t, c in zip(*np.nonzero(distance > 0),
        strict=True)
    ]  # fmt: skip
    return [(t, c) for _, _, t, c in sorted(found)[:n]]


def value_distances(x, share):
    """How far each value is from what is left of its token without some at both ends."""
    n = min(math.ceil(share / 200 * x.shape[1]), (x.shape[1] - 1) // 2)
    ends = [(row[n], row[-1 - n]) for row in np.sort(x, 1)]
    return np.array(
        [[max(low - v, v - high) for v in row] for row, (low, high) in zip(x, ends, strict=True)]
    )


def slots_of(page, n, used):
    """Places and values after the page's first `used` bytes."""
    raw = page[used : used + 4 * n].copy()
    return raw[: 2 * n].view("<u2"), raw[2 * n :].view("<f2")


@pytest.mark.parametrize("d", [8, 40, 64, 100, 128])
@pytest.mark.parametrize("spec", SPECS)
def test_keys_have_the_nearest_level_of_their_channel_s_range(spec, d):
    format_, x, numbers = keys_and_numbers(spec, d)
    page = format_.encode_keys(x, numbers)
    back = format_.decode_keys(page, d, numbers=numbers)
    n = count_of(spec, d)
    outliers = chosen(np.abs(x - numbers.centre) - numbers.scale, n, "key")
    places, kept = slots_of(page, n, 64 * d * format_.bits // 8)
    expected = sorted(place_of(t, c, "key") for t, c in outliers)
    assert places.tolist() == expected + [UNUSED] * (n - len(expected))
    taken = np.zeros(x.shape, bool)
    for t, c in outliers:
        taken[t, c] = True
        assert kept[expected.index(place_of(t, c, "key"))] == np.float16(x[t, c])
        assert back[t, c] == np.float32(np.float16(x[t, c]))
    codes, parameters = format_.quantize(x, numbers)
    assert parameters == ()
    assert_codes(codes, (x - numbers.centre) / numbers.scale, numbers.levels)
    plain = numbers.scale * numbers.levels[codes] + numbers.centre
    np.testing.assert_array_equal(back[~taken], plain[~taken])


@pytest.mark.parametrize("d", [8, 40, 64, 100, 128])
@pytest.mark.parametrize("spec", SPECS)
def test_values_have_the_nearest_level_of_their_token_s_range(spec, d):
    format_, x, numbers = values_and_numbers(spec, d)
    page = format_.encode_values(x, numbers)
    back = format_.decode_values(page, d, numbers=numbers)
    n = count_of(spec, d)
    outliers = chosen(value_distances(x, SHARES[spec.partition("=")[2]]), n, "value")
    assert len(outliers) == n
    padded = -(-d // 32) * 32
    used = 64 * padded * format_.bits // 8 + 256
    places, _ = slots_of(page, n, used)
    assert places.tolist() == sorted(place_of(t, c, "value") for t, c in outliers)
    stored = page[used - 256 : used].copy().view("<f2").astype(np.float32).reshape(2, 64)
    for t in range(64):
        mine = [c for t_, c in outliers if t_ == t]
        rest = np.delete(x[t], mine)
        low, high = rest.min(), rest.max()
        centre = np.float32(np.float16(low / 2 + high / 2))
        scale = np.float32(np.float16(max(high - centre, centre - low)))
        assert (stored[0, t], stored[1, t]) == (scale, centre)
        own, _ = nearest((rest - centre) / scale, numbers.levels)
        near = scale * numbers.levels[own] + centre
        # a value between two levels may have either, by the rounding of the ratio
        np.testing.assert_allclose(np.delete(back[t], mine), near, atol=2e-6 * scale, rtol=0)
        for c in mine:
            assert back[t, c] == np.float32(np.float16(x[t, c]))


@pytest.mark.parametrize("format_", PLAIN, ids=lambda f: f.name)
def test_the_upper_of_two_equally_near_levels_is_taken(format_):
    levels = np.linspace(-1, 1, 2**format_.bits + 1, dtype=np.float32)[1:]  # multiples of 2**-3
    middles = (levels[:-1] + levels[1:]) / 2
    codes, _ = format_.quantize(middles, HeadNumbers(np.float32(1), np.float32(0), levels))
    assert codes.tolist() == list(range(1, 2**format_.bits))


@pytest.mark.parametrize("spec", SPECS)
def test_a_range_of_no_width_is_its_middle(spec):
    format_, d = find(spec), 40
    levels = levels_of(format_.bits)
    x = np.full((64, d), 0.3, np.float32)
    keys = HeadNumbers(np.zeros(d, np.float32), np.full(d, 0.3, np.float32), levels)
    back = format_.decode_keys(format_.encode_keys(x, keys), d, numbers=keys)
    np.testing.assert_array_equal(back, x)
    numbers = HeadNumbers(levels=levels)
    back = format_.decode_values(format_.encode_values(x, numbers), d, numbers=numbers)
    # half the distance between 0.3 and the float16 next to it is the scale's own rounding
    np.testing.assert_allclose(back, x, atol=0.3 * 2.0**-10)


def test_of_equally_far_values_the_first_in_run_order_are_outliers():
    format_, d = find("nuq4:outliers=1%"), 64  # 41 entries
    numbers = HeadNumbers(np.ones(d, np.float32), np.zeros(d, np.float32), levels_of(4))
    x = np.full((64, d), 3, np.float32)
    places, values = slots_of(format_.encode_keys(x, numbers), 41, 2048)
    assert places.tolist() == list(range(41))
    assert set(values.tolist()) == {3}
    x = np.zeros((64, d), np.float32)
    x[:, 5], x[:, 40] = 1, -2
    places, values = slots_of(
        format_.encode_values(x, HeadNumbers(levels=levels_of(4))), 41, 2048 + 256
    )
    assert places.tolist() == [(64 + t) * 32 + 8 for t in range(41)]
    assert set(values.tolist()) == {-2}


def test_outliers_beyond_half_floats_are_limited():
    format_, d = find("nuq2:outliers=1%"), 32
    numbers = HeadNumbers(np.ones(d, np.float32), np.zeros(d, np.float32), levels_of(2))
    x = np.zeros((64, d), np.float32)
    x[3, 4], x[50, 20] = 1e6, -1e30
    back = format_.decode_keys(format_.encode_keys(x, numbers), d, numbers=numbers)
    assert (back[3, 4], back[50, 20]) == (65504, -65504)


def test_the_bits_of_a_value():
    # 64 * 64 codes, 2 * 128 bytes of ranges, 41 outliers of 4 bytes, rounded up to 64 bytes
    assert [find(s).page_bytes(64, "key") for s in SPECS[::3]] == [2048, 1536, 1024]
    assert [find(s).page_bytes(64, "value") for s in SPECS[::3]] == [2304, 1792, 1280]
    assert find("nuq4:outliers=1%").page_bytes(64, "key") == 2048 + 192
    assert find("nuq4:outliers=1%").page_bytes(64, "value") == 2304 + 192
    assert find("nuq3:outliers=1%").bits_per_value(128, "key") == 3 + 384 * 8 / 8192
    assert [f.residual for f in PLAIN] == [64, 128, 128]
    assert {f.key_position for f in PLAIN} == {"read"}


def test_options_are_read_and_named():
    assert find("nuq4:outliers=1%").name == "nuq4:outliers=1%"
    assert find("nuq4:outliers=1.00%").name == "nuq4:outliers=1%"
    assert find("nuq3:outliers=0.5%").n_outliers(128) == 41
    assert find("nuq4:outliers=0%").name == "nuq4"
    assert nuq4.FORMAT.n_outliers(64) == 0
    for bad in ("nuq4:outliers=1", "nuq4:outliers=26%", "nuq4:", "nuq4:outliers=-1%", "nuq4:x=1%"):
        with pytest.raises(ConfigError, match=r"cache type nuq4: '.*' is no option of it"):
            find(bad)
    for bad in ("q4_0:outliers=1%", "f16:x", "kivi2:"):
        with pytest.raises(ConfigError, match="takes no options"):
            find(bad)
    with pytest.raises(UnsupportedError, match="unknown cache type 'nuq5'"):
        find("nuq5:outliers=1%")


def test_a_place_of_16_bits_reaches_heads_of_992():
    format_ = find("nuq4:outliers=1%")
    assert format_.page_bytes(992, "value") > 0
    with pytest.raises(FormatError, match="too few for a head of width 1000"):
        format_.page_bytes(1000, "key")
    assert nuq4.FORMAT.page_bytes(1000, "key") == 32000


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_missing_is_said(spec):
    format_, x = find(spec), np.zeros((64, 32), np.float32)
    with pytest.raises(FormatError, match="`pykv calibrate` writes one"):
        format_.encode_keys(x)
    with pytest.raises(FormatError, match=f"expected {2**format_.bits} levels, not none"):
        format_.encode_values(x, HeadNumbers())
    with pytest.raises(FormatError, match="levels, not an array of shape"):
        format_.encode_values(x, HeadNumbers(levels=np.zeros(3, np.float32)))
