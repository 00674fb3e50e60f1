"""The float8 types against torch's, after clipping to the range."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.formats import fp8_e4m3, fp8_e5m2
from pykv.formats.coded import HeadNumbers

torch = pytest.importorskip("torch", reason="torch knows both float8 types")

KINDS = [
    pytest.param(fp8_e4m3.FORMAT, torch.float8_e4m3fn, 448, id="e4m3"),
    pytest.param(fp8_e5m2.FORMAT, torch.float8_e5m2, 57344, id="e5m2"),
]


def theirs(x, kind, largest):
    """u8: torch's codes of values clipped to the range."""
    clipped = torch.from_numpy(np.clip(x, -largest, largest))
    return clipped.to(kind).view(torch.uint8).numpy()


def their_values(codes, kind):
    return torch.from_numpy(codes).view(kind).to(torch.float32).numpy()


def finite(largest, kind):
    """f32, rising: all finite values."""
    values = their_values(np.arange(128, dtype=np.uint8), kind)
    return values[np.isfinite(values)]


@pytest.mark.parametrize(("format_", "kind", "largest"), KINDS)
def test_every_code_decodes_to_torch_s_value(format_, kind, largest):
    codes = np.arange(256, dtype=np.uint8)
    expected = their_values(codes, kind)
    decoded = format_.dequantize(codes, ())
    known = np.isfinite(expected)
    assert expected[known].max() == largest
    np.testing.assert_array_equal(decoded[known].view(np.uint32), expected[known].view(np.uint32))
    # infinities and NaNs are never written, and show where a page was not
    assert np.isnan(decoded[~known]).all()


@pytest.mark.parametrize(("format_", "kind", "largest"), KINDS)
def test_every_half_float_gets_torch_s_code(format_, kind, largest):
    x = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = x[np.isfinite(x)]
    codes, parameters = format_.quantize(x)
    assert parameters == ()
    np.testing.assert_array_equal(codes, theirs(x, kind, largest))


@pytest.mark.parametrize(("format_", "kind", "largest"), KINDS)
def test_ties_and_their_neighbours_get_torch_s_code(format_, kind, largest):
    values = finite(largest, kind)
    ties = (values[:-1] + values[1:]) / 2
    around = [np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(np.inf))]
    x = np.concatenate([*around, values])
    x = np.concatenate([x, -x]).astype(np.float32)
    codes, _ = format_.quantize(x)
    np.testing.assert_array_equal(codes, theirs(x, kind, largest))
    # of two equally near values the even code
    assert (format_.quantize(ties.astype(np.float32))[0] % 2 == 0).all()


@pytest.mark.parametrize(("format_", "kind", "largest"), KINDS)
def test_any_float32_gets_torch_s_code(format_, kind, largest):
    rng = np.random.default_rng(8)
    x = rng.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    small = np.array([0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-149, 2.0**-126], np.float32)
    x = np.concatenate([x, small, rng.standard_normal(5000).astype(np.float32)])
    codes, _ = format_.quantize(x)
    np.testing.assert_array_equal(codes, theirs(x, kind, largest))


@pytest.mark.parametrize(("format_", "kind", "largest"), KINDS)
def test_what_lies_beyond_the_range_is_stored_as_its_end(format_, kind, largest):
    last = np.float32(largest)
    beyond = [np.nextafter(last, np.float32(np.inf)), last * np.float32(1.04), 65504, 1e9, 3.4e38]
    x = np.array(beyond, np.float32)
    for sign in (1, -1):
        decoded = format_.dequantize(format_.quantize(sign * x)[0], ())
        np.testing.assert_array_equal(decoded, np.full(5, sign * largest))


@pytest.mark.parametrize("scale", [0.25, 0.0123, 37.5])
@pytest.mark.parametrize(("format_", "kind", "largest"), KINDS)
def test_a_head_s_scale_divides_before_and_multiplies_after(format_, kind, largest, scale):
    s = np.float32(scale)
    x = np.random.default_rng(4).standard_normal((64, 40)).astype(np.float32) * np.float32(30)
    x[5, 7], x[6, 7] = 65504, -65504
    expected = their_values(theirs(x / s, kind, largest), kind) * s
    head = HeadNumbers(scale=s)
    keys = format_.decode_keys(format_.encode_keys(x, head), 40, numbers=head)
    values = format_.decode_values(format_.encode_values(x, head), 40, numbers=head)
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(("format_", "kind", "largest"), KINDS)
def test_a_page_is_a_byte_a_value_and_nothing_else(format_, kind, largest):
    x = np.random.default_rng(4).standard_normal((64, 64)).astype(np.float32)
    codes = theirs(x, kind, largest)
    np.testing.assert_array_equal(format_.encode_keys(x).reshape(64, 64), codes.T)
    blocks = codes.reshape(64, 2, 32).transpose(1, 0, 2)
    np.testing.assert_array_equal(format_.encode_values(x).reshape(2, 64, 32), blocks)
