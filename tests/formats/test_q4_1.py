"""The bytes that ggml's reference quantiser writes for one block."""

from __future__ import annotations

import numpy as np

from pykv.formats.q4_1 import FORMAT

X = ((37 * np.arange(32) % 64 - 31) / 8).astype(np.float32)
GOLDEN = bytes.fromhex("3338c0c340d962fb952eb751da730c953ec851ea")


def test_one_block_has_ggml_bytes():
    assert FORMAT.encode(X).tobytes() == GOLDEN


def test_decoding_errs_by_what_the_codes_allow():
    back = FORMAT.decode(np.frombuffer(GOLDEN, np.uint8))
    d = float(np.frombuffer(GOLDEN[:2], "<f2")[0])
    # half a step, and the rounding of scale and minimum
    assert np.abs(back - X).max() <= d / 2 + (15 * d + 4) * 2.0**-11
