"""The bytes that ggml's reference quantiser writes for one block."""

from __future__ import annotations

import numpy as np

from pykv.formats.q5_1 import FORMAT

X = ((37 * np.arange(32) % 64 - 31) / 8).astype(np.float32)
GOLDEN = bytes.fromhex("1134c0c32ab55aa980a2d5f72a4c7f91c4e6193b6e80b3d5")


def test_one_block_has_ggml_bytes():
    assert FORMAT.encode(X).tobytes() == GOLDEN


def test_decoding_errs_by_what_the_codes_allow():
    back = FORMAT.decode(np.frombuffer(GOLDEN, np.uint8))
    d = float(np.frombuffer(GOLDEN[:2], "<f2")[0])
    # half a step, and the rounding of scale and minimum
    assert np.abs(back - X).max() <= d / 2 + (31 * d + 4) * 2.0**-11
