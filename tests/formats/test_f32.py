"""f32 rows are the numbers themselves."""

from __future__ import annotations

import numpy as np

from pykv.formats.f32 import FORMAT


def test_every_bit_is_kept():
    bits = np.array([[0x7FC00001, 0xFF800000, 1, 0x80000000, 0x3F800000]], np.uint32)
    rows = FORMAT.encode(bits.view(np.float32))
    assert rows[0, -4:].tolist() == [0, 0, 0x80, 0x3F]
    np.testing.assert_array_equal(FORMAT.decode(rows).view(np.uint32), bits)


def test_a_key_page_runs_along_tokens_and_a_value_page_along_channels():
    x = np.arange(64 * 40, dtype=np.float32).reshape(64, 40)
    np.testing.assert_array_equal(FORMAT.encode_keys(x).view(np.float32).reshape(40, 64), x.T)
    values = FORMAT.encode_values(x).view(np.float32).reshape(2, 64, 32)
    np.testing.assert_array_equal(values[0], x[:, :32])
    np.testing.assert_array_equal(values[1], np.pad(x[:, 32:], ((0, 0), (0, 24))))
