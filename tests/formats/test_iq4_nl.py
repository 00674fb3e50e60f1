"""ggml's reference quantiser: a block that it wrote, and where it is installed any block."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from pykv.formats.iq4_nl import FORMAT, TABLE

X = ((37 * np.arange(32) % 64 - 31) / 8).astype(np.float32)
LIBRARIES = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll")
GOLDEN = bytes.fromhex("23a8cf26ae036be138cf159df25bd137be14")


def test_decoding_gives_the_steps_that_ggml_chose():
    d = float(np.frombuffer(GOLDEN[:2], "<f2")[0])
    # ggml takes the step nearest to x over a trial scale that puts the extremum, 4, on step 0,
    # and refits the scale afterwards
    codes = np.abs(X[:, None] / (4 / TABLE[0]) - np.array(TABLE)).argmin(-1)
    expected = np.float32(d) * np.array(TABLE, np.float32)[codes]
    np.testing.assert_array_equal(FORMAT.decode(np.frombuffer(GOLDEN, np.uint8)), expected)


def test_one_block_has_ggml_bytes():
    assert FORMAT.encode(X).tobytes() == GOLDEN


def test_of_two_equally_near_steps_the_upper_one():
    x = np.zeros(32, np.float32)
    x[:4] = -127, 7, -5.5, -4.5  # 7 lies between 1 and 13; -4.5 between -10 and 1
    q = FORMAT.quantize(x)[0]
    assert [TABLE[c] for c in q[:4]] == [-127, 13, -10, 1]


def test_a_block_of_almost_nothing_has_codes_and_scale_zero():
    block = FORMAT.encode(np.full(32, 9e-16, np.float32))
    assert block.tobytes() == bytes(18)


@pytest.fixture(scope="module")
def ggml_row():
    """ggml's own quantiser of a row: f32 [n] -> u8 [n / 32 * 18]."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None:
        pytest.skip("llama-cpp-python is not installed: no quantize_row_iq4_nl_ref to compare with")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    names = [p for p in folder.iterdir() if p.name in LIBRARIES]
    if not names:
        pytest.skip(f"none of {LIBRARIES} in {folder}")
    function = ctypes.CDLL(str(names[0])).quantize_row_iq4_nl_ref
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None

    def quantize(x):
        x = np.ascontiguousarray(x, np.float32)
        # ggml leaves the codes of a zero block as they are
        out = np.zeros(x.size // 32 * 18, np.uint8)
        function(x.ctypes.data, out.ctypes.data, x.size)
        return out

    return quantize


def rows(seed, d):
    """f32 [64, d] of every size, with ties, constants and blocks of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((64, d)) * 10.0 ** rng.uniform(-4, 4, (64, 1))
    x[1] = np.round(rng.standard_normal(d) * 4) / 8
    x[2], x[3], x[4] = 0, 3.25, 1e-16
    x[5] = rng.choice([-1, 1], d)
    x[6] = np.arange(d) % 64 - 31.5
    x[7] = rng.choice(TABLE, d)
    return x.astype(np.float32)


def test_rows_are_ggml_s(ggml_row):
    x = rows(1, 256)
    written = np.any(np.abs(x.reshape(-1, 32)) > 1e-15, 1)
    theirs = ggml_row(x).reshape(-1, 18)
    ours = FORMAT.encode(x).reshape(-1, 18)
    np.testing.assert_array_equal(ours[written], theirs[written])
    # ggml leaves the codes of a zero block undefined; ours are 0
    np.testing.assert_array_equal(theirs[~written][:, :2], ours[~written][:, :2])
    assert not ours[~written].any()


@pytest.mark.parametrize("d", [32, 40, 72, 100, 128])
def test_pages_hold_what_ggml_s_blocks_hold(ggml_row, d):
    x = rows(d, d)
    # zeros have no weight in the scale, and are never the extremum unless all are zero
    filled = np.pad(x, ((0, 0), (0, -d % 32)))
    expected = FORMAT.decode(ggml_row(filled).reshape(64, -1))[:, :d]
    keys = FORMAT.decode_keys(FORMAT.encode_keys(x), d)
    values = FORMAT.decode_values(FORMAT.encode_values(x), d)
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, expected)


def test_the_table_has_no_zero_and_rises():
    assert list(TABLE) == sorted(TABLE)
    assert min(np.abs(TABLE)) == 1
