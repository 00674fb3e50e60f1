"""Where every code and every parameter lies in a page, worked out here value by value."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from pykv import registry
from pykv.errors import FormatError
from pykv.formats.coded import CodedFormat, HeadNumbers

FORMATS = {n: registry.find("formats", n, "cache type").FORMAT for n in registry.names("formats")}
CODED = [name for name, format_ in FORMATS.items() if isinstance(format_, CodedFormat)]
NUQ = ["nuq4", "nuq3", "nuq2"]  # whose layout test_nuq4.py checks
WIDTHS = [9, 32, 40, 64, 72, 80, 100, 112, 128, 256]

# bits, what shares a scale among keys and among values, and whether there is a minimum
SHAPES = {
    "q8_0": (8, "block", "block", False),
    "q5_1": (5, "block", "block", True),
    "q5_0": (5, "block", "block", False),
    "q4_1": (4, "block", "block", True),
    "q4_0": (4, "block", "block", False),
    "iq4_nl": (4, "block", "block", False),
    "int8": (8, "token", "token", False),
    "kivi4": (4, "channel", "block", True),
    "kivi3": (3, "channel", "block", True),
    "kivi2": (2, "channel", "block", True),
    "tq4": (4, "token", "token", False),
    "tq3": (3, "token", "token", False),
    "fp8_e4m3": (8, "head", "head", False),
    "fp8_e5m2": (8, "head", "head", False),
}
TQ4 = (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326)
TQ3 = (0.2451, 0.7560, 1.3439, 2.1519)
STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def signed(code):
    return np.where(code > 127, code - 256.0, code)


def mirrored(upper):
    return np.array([-x for x in reversed(upper)] + list(upper), np.float32)


def small_float(mantissa, bias, code):
    """What an eight-bit float stands for."""
    size = code % 128
    exponent, fraction = size >> mantissa, size % (1 << mantissa)
    value = np.where(
        exponent > 0,
        (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias),
        fraction / (1 << mantissa) * 2.0 ** (1 - bias),
    )
    return np.where(code > 127, -value, value)


def from_minimum(code, s, m):
    return s * code + m


VALUES = {  # code, scale, minimum -> the value
    "q8_0": lambda code, s, m: s * signed(code),
    "q5_1": from_minimum,
    "q5_0": lambda code, s, m: s * (code - 16.0),
    "q4_1": from_minimum,
    "q4_0": lambda code, s, m: s * (code - 8.0),
    "iq4_nl": lambda code, s, m: s * np.array(STEPS)[code],
    "int8": lambda code, s, m: s * signed(code),
    "kivi4": from_minimum,
    "kivi3": from_minimum,
    "kivi2": from_minimum,
    "tq4": lambda code, s, m: s * mirrored(TQ4)[code],
    "tq3": lambda code, s, m: s * mirrored(TQ3)[code],
    "fp8_e4m3": lambda code, s, m: small_float(3, 7, code),
    "fp8_e5m2": lambda code, s, m: small_float(2, 15, code),
}
LAST_FLOAT = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}


def sets_of(bits):
    """(bits of a set, the lowest bit of the code that it holds)"""
    return {5: [(4, 0), (1, 4)], 3: [(2, 0), (1, 2)]}.get(bits, [(bits, 0)])


def channels(d, side):
    """How many channels a page has codes for: values are padded to whole blocks of 32."""
    return d if side == "key" or d % 32 == 0 else d + 32 - d % 32


def run_and_lane(t, c, side):
    """A run is 16 tokens of one channel of keys, or 16 channels of one token of values."""
    if side == "key":
        return c * 4 + t // 16, t % 16
    return (c // 32 * 64 + t) * 2 + c % 32 // 16, c % 16


@cache
def place_of_run(run, bits, n_runs):
    """For each set (first byte, lowest bit in the byte, bits, lowest bit in the code); the end."""
    start, found = 0, []
    for width, low in sets_of(bits):
        runs_of_a_unit = 8 // width
        unit, k = run // runs_of_a_unit, run % runs_of_a_unit
        found.append((start + unit * 16, k * width, width, low))
        units = n_runs // runs_of_a_unit + (n_runs % runs_of_a_unit > 0)
        start += units * 16
    return found, start


def place(t, c, bits, d, side):
    """Of one code: for each set (byte, lowest bit in the byte, bits, lowest bit in the code)."""
    run, lane = run_and_lane(t, c, side)
    found, end = place_of_run(run, bits, channels(d, side) * 64 // 16)
    return [(first + lane, *bits_) for first, *bits_ in found], end


@cache
def code_places(bits, d, side):
    """i64 [sets, 4, 64, channels] of all codes, and the bytes that they take."""
    n_runs = channels(d, side) * 64 // 16
    table = np.array([place_of_run(run, bits, n_runs)[0] for run in range(n_runs)])
    runs, lanes = run_and_lane(*np.indices((64, channels(d, side))), side)
    places = np.moveaxis(table[runs], (2, 3), (0, 1)).copy()
    places[:, 0] += lanes
    return places, place_of_run(0, bits, n_runs)[1]


def codes_of(page, bits, d, side):
    """u8 page -> the codes of all tokens and channels, padding too."""
    places, _ = code_places(bits, d, side)
    codes = 0
    for byte, shift, width, low in places:
        codes = codes | (page[byte].astype(int) >> shift) % (1 << width) << low
    return codes


def scale_index(axis, t, c, d):
    """Which of a page's scales is that of token t and channel c."""
    return {"block": c // 32 * 64 + t, "channel": t // 32 * d + c, "token": t, "head": 0}[axis]


def n_scales(axis, d):
    blocks = d // 32 + (d % 32 > 0)
    return {"block": blocks * 64, "channel": 2 * d, "token": 64, "head": 0}[axis]


def members(axis, t, c, d):
    """The (t, c) of the values that share a scale with one, as an index of [64, d]."""
    return {
        "block": (t, slice(c // 32 * 32, min(c // 32 * 32 + 32, d))),
        "channel": (slice(t // 32 * 32, t // 32 * 32 + 32), c),
        "token": (t, slice(None)),
        "head": (t, slice(c, c + 1)),
    }[axis]


def parts(name, page, d, side):
    """Codes [64, channels], each value's scale and minimum [64, d], and where the bytes end."""
    bits, *axes, has_minimum = SHAPES[name]
    axis = axes[side == "value"]
    _, start = code_places(bits, d, side)
    codes, n = codes_of(page, bits, d, side), n_scales(axis, d)
    numbers = page[start : start + 2 * n * (1 + has_minimum)].copy().view("<f2").astype(float)
    scale, minimum = np.ones((64, d)), np.zeros((64, d))
    index = scale_index(axis, *np.indices((64, d)), d)
    if n:
        scale = numbers[index]
    if has_minimum:
        minimum = numbers[n + index]
    return codes, scale, minimum, start + 2 * len(numbers)


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


def coders(name, side):
    format_ = FORMATS[name]
    if side == "key":
        return format_.encode_keys, format_.decode_keys
    return format_.encode_values, format_.decode_values


def random_page(name, d, side, rng):
    """Any codes that an encoder may write, and finite scales."""
    bits, *axes, has_minimum = SHAPES[name]
    _, start = code_places(bits, d, side)
    page = rng.integers(0, 256, FORMATS[name].page_bytes(d, side), dtype=np.uint8)
    if name in LAST_FLOAT:
        page = np.minimum(page % 128, LAST_FLOAT[name]).astype(np.uint8) | page & np.uint8(128)
    n = n_scales(axes[side == "value"], d) * (1 + has_minimum)
    page[start : start + 2 * n] = rng.standard_normal(n).astype("<f2").view(np.uint8)
    return page


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", SHAPES)
def test_decoding_reads_each_value_from_its_place(name, side):
    for d in WIDTHS:
        page = random_page(name, d, side, np.random.default_rng(d))
        codes, scale, minimum, _ = parts(name, page, d, side)
        expected = VALUES[name](codes[:, :d], scale, minimum)
        decoded = coders(name, side)[1](page, d)
        assert decoded.shape == (64, d)
        assert decoded.dtype == np.float32
        # a product and a sum, each rounded to float32, of codes up to 32 and scales below 5
        np.testing.assert_allclose(
            decoded, expected, rtol=2.0**-22, atol=5 * 32 * 2.0**-22, err_msg=f"width {d}"
        )


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", SHAPES)
def test_encoding_writes_each_group_to_its_place(name, side):
    _, *axes, has_minimum = SHAPES[name]
    axis = axes[side == "value"]
    for d in WIDTHS:
        rng = np.random.default_rng(d)
        x = rng.standard_normal((64, d)).astype(np.float32) * np.float32(3)
        page = coders(name, side)[0](x)
        codes, scale, minimum, end = parts(name, page, d, side)
        assert not codes[:, d:].any()
        assert not page[end:].any()
        assert end <= page.size < end + 64
        corners = [(0, 0), (63, d - 1), (31, d - 1), (32, 0)]
        for t, c in corners + [tuple(rng.integers(0, (64, d))) for _ in range(10)]:
            at = members(axis, t, c, d)
            own, parameters = FORMATS[name].quantize(np.ascontiguousarray(x[at]))
            np.testing.assert_array_equal(codes[:, :d][at], own, err_msg=f"width {d}")
            stored = [scale[t, c], minimum[t, c]][: 1 + has_minimum] if axis != "head" else []
            assert stored == [float(np.float16(p[0])) for p in parameters]


def test_a_code_of_five_bits_and_one_of_three_by_hand():
    # key pages of 32 channels: token 17 of channel 3 is lane 1 of run 13
    assert place(17, 3, 5, 32, "key") == ([(6 * 16 + 1, 4, 4, 0), (1024 + 17, 5, 1, 4)], 1280)
    assert place(17, 3, 3, 32, "key") == ([(3 * 16 + 1, 2, 2, 0), (512 + 17, 5, 1, 2)], 768)
    # token 5, channel 50 of values: block 1, second half, lane 2: run (64 + 5) * 2 + 1 = 139
    assert place(5, 50, 5, 40, "value") == (
        [(69 * 16 + 2, 4, 4, 0), (2048 + 17 * 16 + 2, 3, 1, 4)],
        2560,
    )
    page = np.zeros(FORMATS["q5_0"].page_bytes(32, "key"), np.uint8)
    page[97], page[1041] = 0b1001_0000, 0b0010_0000  # 9, and 16
    page[1280 + 34 : 1280 + 36] = 0, 0x3C  # the scale of token 17: 1
    expected = np.zeros((64, 32))
    expected[17] = -16
    expected[17, 3] = 9
    np.testing.assert_array_equal(FORMATS["q5_0"].decode_keys(page, 32), expected)


BITS = {  # of a value in a full page: keys and values of widths 64 and 128
    "q8_0": (8.5, 8.5, 8.5, 8.5),
    "q5_1": (6, 6, 6, 6),
    "q5_0": (5.5, 5.5, 5.5, 5.5),
    "q4_1": (5, 5, 5, 5),
    "q4_0": (4.5, 4.5, 4.5, 4.5),
    "iq4_nl": (4.5, 4.5, 4.5, 4.5),
    "int8": (8.25, 8.25, 8.125, 8.125),
    "kivi4": (5, 5, 5, 5),
    "kivi3": (4, 4, 4, 4),
    "kivi2": (3, 3, 3, 3),
    "tq4": (4.25, 4.25, 4.125, 4.125),
    "tq3": (3.25, 3.25, 3.125, 3.125),
    "fp8_e4m3": (8, 8, 8, 8),
    "fp8_e5m2": (8, 8, 8, 8),
}


@pytest.mark.parametrize("name", BITS)
def test_the_bits_of_a_value(name):
    sizes = [FORMATS[name].bits_per_value(d, side) for d in (64, 128) for side in ("key", "value")]
    assert tuple(sizes) == BITS[name]


def test_padding_is_counted():
    # 80 channels: keys 80 * 32 bytes and 3 blocks of 64 scales; values as 96 channels
    assert FORMATS["q4_0"].page_bytes(80, "key") == 2560 + 384
    assert FORMATS["q4_0"].page_bytes(80, "value") == 3072 + 384
    assert FORMATS["q4_0"].bits_per_value(80, "value") == 5.4
    # 100 channels of kivi4 keys: 3200 + 200 groups of 4 bytes, rounded up to 64
    assert FORMATS["kivi4"].page_bytes(100, "key") == 4032
    assert FORMATS["kivi4"].page_bytes(100, "value") == 4096 + 1024
    # 9 channels of kivi3 keys: 36 runs are 9 units of 2 bits and 4.5, so 5, of 1 bit; 18 groups
    assert FORMATS["kivi3"].page_bytes(9, "key") == 320  # of them 144 + 80 + 72 in use
    assert FORMATS["int8"].page_bytes(40, "value") == 64 * 64 + 128


RESIDUAL = {8: 0, 5: 64, 4: 64, 3: 128, 2: 128}
HADAMARD = {"q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}


@pytest.mark.parametrize("name", SHAPES)
def test_defaults_follow_the_bits(name):
    format_ = FORMATS[name]
    assert format_.residual == RESIDUAL[SHAPES[name][0]]
    turned = "hadamard" if name in HADAMARD else "random" if name.startswith("tq") else "none"
    assert format_.transform == turned


def test_no_format_is_left_out():
    assert set(SHAPES) == set(VALUES) == set(BITS)
    assert {*SHAPES, *NUQ} == set(CODED)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("side", ["key", "value"])
def test_a_page_of_another_size_or_number_of_tokens_is_refused(name, side):
    encode, decode = coders(name, side)
    numbers = numbers_of(name, side, 72)
    page = encode(np.zeros((64, 72), np.float32), numbers)
    for torn in (page[:-1], page[:-64], np.append(page, page[:64]), page[None], page[:0]):
        with pytest.raises(FormatError, match=rf"{name}: a page of shape .* {page.size} bytes"):
            decode(torn, 72, numbers=numbers)
    for n in (0, 1, 16, 63, 65, 128):
        with pytest.raises(FormatError, match=f"{name}: a page takes 64 tokens, not {n}$"):
            encode(np.zeros((n, 72), np.float32), numbers)
    for n in (0, 16, 63):
        with pytest.raises(FormatError, match=f"not {n}$"):
            decode(page, 72, n)
        with pytest.raises(FormatError, match=f"not {n}$"):
            FORMATS[name].page_bytes(72, side, n)


def test_codes_that_pages_have_no_place_for_are_refused_where_they_are_written():
    with pytest.raises(FormatError, match="Int7: codes have one of 8, 5, 4, 3, 2 bits, not 7"):

        class Int7(CodedFormat):
            bits = 7
