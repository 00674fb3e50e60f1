"""The bytes that ggml's reference quantiser writes for one block."""

from __future__ import annotations

import numpy as np

from pykv.formats.q8_0 import FORMAT

X = ((37 * np.arange(32) % 64 - 31) / 8).astype(np.float32)
GOLDEN = bytes.fromhex("08288518ad40d467fc9124b94be073089d30c457ec7f14a93cd063f88d20b547dc6f")


def test_one_block_has_ggml_bytes():
    assert FORMAT.encode(X).tobytes() == GOLDEN


def test_decoding_errs_by_what_the_codes_allow():
    back = FORMAT.decode(np.frombuffer(GOLDEN, np.uint8))
    d = float(np.frombuffer(GOLDEN[:2], "<f2")[0])
    # half a step, and the scale's own rounding at the ends
    assert np.abs(back - X).max() <= d / 2 + 127 * d * 2.0**-11


def test_halves_round_away_from_zero():
    x = np.zeros(32, np.float32)
    x[:5] = 127, 0.5, -0.5, 1.5, 0.49999997  # d = 1
    assert FORMAT.encode(x)[2:7].view(np.int8).tolist() == [127, 1, -1, 2, 0]
