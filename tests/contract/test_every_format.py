"""What holds for every file of `formats`, with the `gguf` package as the outsider."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pykv import registry
from pykv.errors import FormatError
from pykv.formats.coded import CodedFormat, HeadNumbers

NAMES = registry.names("formats")
FORMATS = {name: registry.find("formats", name, "cache type").FORMAT for name in NAMES}
WEIGHTS = [name for name in NAMES if "weight" in FORMATS[name].roles]
BLOCKS = [name for name in WEIGHTS if FORMATS[name].block_len > 1]
BY_GGUF = ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]
WRITTEN = [*BY_GGUF, "iq4_nl"]  # the gguf package writes no iq4_nl
CACHES = [name for name in NAMES if "cache" in FORMATS[name].roles]
CODED = [name for name in CACHES if isinstance(FORMATS[name], CodedFormat)]
FLOATS = [name for name in CACHES if name not in CODED]


def theirs(name):
    return gguf.GGMLQuantizationType[name.upper()]


def test_the_types_are_all_there():
    assert set(WRITTEN) | {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"} <= (
        set(WEIGHTS)
    )
    assert set(FLOATS) == {"f32", "f16", "bf16"}
    assert {"q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "int8", "fp8_e4m3", "fp8_e5m2"} <= (
        set(CODED)
    )
    assert {"kivi4", "kivi3", "kivi2", "tq4", "tq3"} <= set(CODED)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_name_is_the_name(name):
    assert FORMATS[name].name == name


@pytest.mark.parametrize("name", WEIGHTS)
def test_blocks_have_gguf_sizes(name):
    format_ = FORMATS[name]
    assert (format_.block_len, format_.block_bytes) == gguf.GGML_QUANT_SIZES[theirs(name)]


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("extreme", [False, True])
def test_decoding_is_gguf_bit_for_bit(name, extreme, random_rows):
    rows = random_rows(FORMATS[name], 7, 40, extreme=extreme)
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(rows, theirs(name))
    assert np.isfinite(expected).all()
    decoded = FORMATS[name].decode(rows)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", BLOCKS)
def test_decoding_every_code_is_gguf_bit_for_bit(name, every_byte):
    rows = every_byte(FORMATS[name])
    expected = gguf.quants.dequantize(rows, theirs(name))
    np.testing.assert_array_equal(
        FORMATS[name].decode(rows).view(np.uint32), expected.view(np.uint32)
    )


@pytest.mark.parametrize("name", WEIGHTS)
def test_leading_axes_and_strides_do_not_matter(name, random_rows):
    format_ = FORMATS[name]
    rows = random_rows(format_, 12, 3)
    flat = format_.decode(rows)
    assert flat.shape == (12, 3 * format_.block_len)
    np.testing.assert_array_equal(format_.decode(rows.reshape(2, 6, -1)), flat.reshape(2, 6, -1))
    np.testing.assert_array_equal(format_.decode(rows[0]), flat[0])
    spread = np.zeros((12, 2 * rows.shape[1]), np.uint8)
    spread[:, ::2] = rows
    np.testing.assert_array_equal(format_.decode(spread[:, ::2]), flat)
    assert format_.decode(rows[:, :0]).shape == (12, 0)
    assert format_.decode(rows[:0]).shape == (0, flat.shape[1])


@pytest.mark.parametrize("name", [n for n in WEIGHTS if FORMATS[n].block_bytes > 1])
def test_a_torn_block_is_refused(name, random_rows):
    with pytest.raises(FormatError, match=rf"{name}: a row of \d+ bytes"):
        FORMATS[name].decode(random_rows(FORMATS[name], 1, 2)[:, :-1])


def _values(seed, spread):
    """f32 [20, 512] of every size, with ties, runs of one value, signs of zero and zero blocks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((20, 512)) * 10.0 ** rng.uniform(-spread, spread, (20, 1))
    x[1] = np.round(rng.standard_normal(512) * 4) / 8
    x[2, :256], x[2, 256:] = 0, -0.0
    x[3] = 3.25
    x[4] = rng.choice([-1, 1], 512)
    x[5] = np.arange(512) % 64 - 31.5
    return x.astype(np.float32)


@pytest.mark.parametrize("name", BY_GGUF)
@pytest.mark.parametrize("spread", [1, 4])
def test_encoding_is_gguf_byte_for_byte(name, spread):
    x = _values(3, spread)
    expected = gguf.quants.quantize(x, theirs(name)).view(np.uint8)
    np.testing.assert_array_equal(FORMATS[name].encode(x), expected)
    deep = FORMATS[name].encode(x.reshape(4, 5, 512))
    np.testing.assert_array_equal(deep, expected.reshape(4, 5, -1))


@pytest.mark.parametrize("name", [n for n in WRITTEN if FORMATS[n].block_len > 1])
def test_encoding_refuses_what_has_no_code(name):
    format_ = FORMATS[name]
    with pytest.raises(FormatError, match="33 values"):
        format_.encode(np.zeros((2, 33), np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((1, 64), np.float32)
        x[0, 40] = bad
        with pytest.raises(FormatError, match="NaN or infinity"):
            format_.encode(x)
    with pytest.raises(FormatError, match="65504"):
        format_.encode(np.linspace(-3e38, 3e38, 32, dtype=np.float32))


@pytest.mark.parametrize("name", [n for n in WRITTEN if FORMATS[n].block_len > 1])
def test_values_below_every_scale_become_zero(name):
    x = np.linspace(-1e-39, 1e-39, 32, dtype=np.float32)
    np.testing.assert_array_equal(FORMATS[name].decode(FORMATS[name].encode(x)), np.zeros(32))


@pytest.mark.parametrize("name", [n for n in WEIGHTS if n not in WRITTEN])
def test_types_without_an_encoder_say_so(name):
    with pytest.raises(FormatError, match=f"{name}: pykv reads this type"):
        FORMATS[name].encode(np.zeros((1, 256), np.float32))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in CACHES])
def test_types_without_pages_say_so(name):
    format_ = FORMATS[name]
    x, page = np.zeros((64, 64), np.float32), np.zeros(64, np.uint8)
    for call in (
        lambda: format_.page_bytes(64, "key"),
        lambda: format_.bits_per_value(64, "value"),
        lambda: format_.encode_keys(x),
        lambda: format_.encode_values(x),
        lambda: format_.decode_keys(page, 64, 64),
        lambda: format_.decode_values(page, 64, 64),
    ):
        with pytest.raises(FormatError, match=f"{name}: a type of weights"):
            call()


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


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("d", [1, 32, 80, 100, 128, 576])
def test_a_page_of_codes_has_its_size_and_decodes_to_64_tokens(name, d):
    format_ = FORMATS[name]
    x = np.random.default_rng(d).standard_normal((64, d)).astype(np.float32)
    for side, encode, decode in (
        ("key", format_.encode_keys, format_.decode_keys),
        ("value", format_.encode_values, format_.decode_values),
    ):
        numbers = numbers_of(name, side, d)
        page = encode(x, numbers)
        assert page.dtype == np.uint8
        assert page.shape == (format_.page_bytes(d, side),)
        assert page.size % 64 == 0
        assert format_.bits_per_value(d, side) == page.size * 8 / (64 * d)
        back = decode(page, d, numbers=numbers)
        assert back.shape == (64, d)
        assert back.dtype == np.float32
        # neither strides nor what was in memory before matter
        np.testing.assert_array_equal(encode(np.asfortranarray(x), numbers), page)
        np.testing.assert_array_equal(
            decode(np.stack([page, page], 1)[:, 0], d, numbers=numbers), back
        )


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("n", [16, 48, 64])
@pytest.mark.parametrize("d", [32, 80, 100, 128])
def test_a_page_of_floats_has_its_size_and_decodes_to_its_tokens(name, n, d):
    format_ = FORMATS[name]
    x = np.random.default_rng(d + n).standard_normal((n, d)).astype(np.float32)
    for side, encode, decode in (
        ("key", format_.encode_keys, format_.decode_keys),
        ("value", format_.encode_values, format_.decode_values),
    ):
        page = encode(x)
        assert page.dtype == np.uint8
        assert page.shape == (format_.page_bytes(d, side, n),)
        assert page.size % 64 == 0
        back = decode(page, d, n)
        assert back.shape == (n, d)
        assert back.dtype == np.float32
        # the coarsest of these is bf16: eight bits of mantissa, rounded to nearest
        assert (np.abs(back - x) <= np.abs(x) * 2.0**-8).all()
        np.testing.assert_array_equal(encode(back), page)
        with pytest.raises(FormatError, match="bytes were expected"):
            decode(page[:-1], d, n)
    bits = format_.page_bytes(d, "value") * 8 / (64 * d)
    assert format_.bits_per_value(d, "value") == bits


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 63, 80])
def test_a_page_of_floats_takes_whole_runs_of_tokens(name, n):
    for encode in (FORMATS[name].encode_keys, FORMATS[name].encode_values):
        with pytest.raises(FormatError, match=f"not {n}$"):
            encode(np.zeros((n, 32), np.float32))
