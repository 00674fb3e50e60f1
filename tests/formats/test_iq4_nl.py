"""A block that ggml's reference quantiser wrote."""

from __future__ import annotations

import numpy as np

from pykv.formats.iq4_nl import FORMAT, TABLE

X = ((37 * np.arange(32) % 64 - 31) / 8).astype(np.float32)
GOLDEN = bytes.fromhex("23a8cf26ae036be138cf159df25bd137be14")


def test_decoding_gives_the_steps_that_ggml_chose():
    d = float(np.frombuffer(GOLDEN[:2], "<f2")[0])
    # ggml takes the step nearest to x over a trial scale that puts the extremum, 4, on step 0,
    # and refits the scale afterwards
    codes = np.abs(X[:, None] / (4 / TABLE[0]) - np.array(TABLE)).argmin(-1)
    expected = np.float32(d) * np.array(TABLE, np.float32)[codes]
    np.testing.assert_array_equal(FORMAT.decode(np.frombuffer(GOLDEN, np.uint8)), expected)


def test_the_table_has_no_zero_and_rises():
    assert list(TABLE) == sorted(TABLE)
    assert min(np.abs(TABLE)) == 1
