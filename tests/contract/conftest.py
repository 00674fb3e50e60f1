"""Random rows of a format, for the contracts of formats and of kernels."""

from __future__ import annotations

import numpy as np
import pytest

# the scales that a half float can hold at its ends, beside ordinary ones
SCALES = np.array(
    [65504, -65504, 2.0**-24, -(2.0**-24), 1023 * 2.0**-24, 2.0**-14, 0, -0.0, 1, -1, 0.0123, -7.7],
    np.float16,
)


def _rows(format_, n_rows, n_blocks, *, extreme=False, seed=0):
    """u8 [n_rows, n_blocks * block_bytes]: any bytes, but every float in them finite."""
    rng = np.random.default_rng(seed)
    layout = format_.layout
    if layout.names is None:
        scale = 10.0 ** rng.uniform(-4, 4, (n_rows, n_blocks))
        return format_.encode((scale * rng.standard_normal(scale.shape)).astype(np.float32))
    rows = rng.integers(0, 256, (n_rows, n_blocks * format_.block_bytes), dtype=np.uint8)
    blocks = rows.view(layout)
    for name in layout.names:
        field = blocks[name]
        if field.dtype.kind == "f":
            ordinary = rng.normal(0, 0.01, field.shape)
            field[:] = rng.choice(SCALES, field.shape) if extreme else ordinary
        elif name == "e" and not extreme:  # mxfp4's exponent: weights of an ordinary size
            field[:] = rng.integers(100, 130, field.shape)
        elif name == "e":
            field[:] = rng.choice([0, 1, 2, 3, 127, 128, 200, 250], field.shape)
    return rows


def _every_byte(format_):
    """u8 [256, block_bytes]: in the 256 blocks each byte of the codes takes every value."""
    i, j = np.arange(256)[:, None], np.arange(format_.block_bytes)
    rows = ((i + 37 * j) % 256).astype(np.uint8)
    blocks = rows.view(format_.layout)
    for name in format_.layout.names:
        if blocks[name].dtype.kind == "f":
            blocks[name] = 1
        elif name == "e":
            blocks[name] = 128
    return rows


@pytest.fixture
def random_rows():
    return _rows


@pytest.fixture
def every_byte():
    return _every_byte
