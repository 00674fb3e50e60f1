"""The maps of pages: orthogonal, and what their names say."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.backends.transforms import check, hadamard_block, matrices, matrix, resolve, width
from pykv.errors import ConfigError
from pykv.formats.coded import HeadNumbers

U = 2.0**-24
WIDTHS = [1, 5, 32, 40, 64, 72, 80, 96, 100, 112, 128, 192, 256, 512, 640]


@pytest.mark.parametrize(
    ("d", "block"),
    [(32, 32), (64, 64), (96, 32), (128, 128), (160, 32), (192, 64), (256, 256), (512, 256),
     (576, 64), (40, 0), (72, 0), (80, 0), (100, 0), (112, 0), (1, 0)],
)  # fmt: skip
def test_hadamard_blocks(d, block):
    assert hadamard_block(d) == block


@pytest.mark.parametrize("d", [d for d in WIDTHS if d % 32 == 0])
def test_hadamard_matrices(d):
    """Sign of entry i, j of a block: the parity of the bits that i and j share."""
    block, expected = hadamard_block(d), np.zeros((d, d))
    for start in range(0, d, block):
        for i in range(block):
            for j in range(block):
                sign = -1 if (i & j).bit_count() % 2 else 1
                expected[start + i, start + j] = sign / block**0.5
    np.testing.assert_array_equal(matrix("hadamard", d), expected.astype(np.float32))


@pytest.mark.parametrize("d", WIDTHS)
def test_random_matrices_are_orthogonal_and_the_same_in_every_process(d):
    m = matrix("random", d).astype(np.float64)
    assert m.shape == (d, d)
    # entries are rounded to float32, so a product of two rows of length 1 is off by 2 u at most
    np.testing.assert_allclose(m @ m.T, np.eye(d), rtol=0, atol=3 * U)
    normal = np.random.default_rng((0x70796B76, d)).standard_normal((d, d))
    # Q of a QR with R's diagonal positive is unique: its transpose makes the matrix triangular
    r = m.T @ normal
    assert (np.abs(np.tril(r, -1)) <= 2 * U * np.linalg.norm(normal, axis=0)).all()
    assert (np.diag(r) > 0).all()


def test_random_matrices_mix_all_channels():
    m = np.abs(matrix("random", 80))
    assert m.max() < 5 * 80**-0.5  # of 6,400 about normal entries of that deviation


@pytest.mark.parametrize("transform", ["none", "hadamard", "random"])
@pytest.mark.parametrize("d", [64, 96])
def test_a_matrix_is_shared_and_cannot_be_written(transform, d):
    m = matrix(transform, d)
    assert m is matrix(transform, d)
    if transform == "none":
        assert m is None
        assert matrices(transform, d, ()) is None
    else:
        with pytest.raises(ValueError, match="read-only"):
            m[0, 0] = 1
        np.testing.assert_array_equal(matrices(transform, d, ()), m[None])


def test_low_rank_maps_are_the_first_columns_of_each_heads_basis():
    bases = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32)
    numbers = [HeadNumbers(basis=basis) for basis in bases]
    np.testing.assert_array_equal(matrices("lowrank:5", 8, numbers), bases[:, :, :5])
    assert (width("lowrank:5", 8), width("random", 8)) == (5, 8)
    with pytest.raises(ConfigError, match="transform lowrank:5 needs a calibration file's bases"):
        matrices("lowrank:5", 8, [HeadNumbers(), HeadNumbers()])
    with pytest.raises(ConfigError, match="--kv-transform-v lowrank:9: this model's heads have 8"):
        resolve("lowrank:9", "none", 8, "--kv-transform-v")


@pytest.mark.parametrize(
    ("chosen", "preferred", "d", "expected"),
    [
        ("auto", "none", 64, "none"),
        ("auto", "hadamard", 64, "hadamard"),
        ("auto", "hadamard", 80, "random"),
        ("auto", "random", 64, "random"),
        ("none", "hadamard", 64, "none"),
        ("random", "hadamard", 64, "random"),
        ("hadamard", "none", 96, "hadamard"),
    ],
)
def test_resolve(chosen, preferred, d, expected):
    assert resolve(chosen, preferred, d, "--kv-transform-k") == expected


@pytest.mark.parametrize("d", [72, 80])
def test_a_width_without_a_hadamard_matrix_is_refused(d):
    sentence = f"--kv-transform-v hadamard needs a head width that 32 divides, .* is {d}; random or"
    with pytest.raises(ConfigError, match=sentence):
        resolve("hadamard", "none", d, "--kv-transform-v")


def test_names():
    for name in ("auto", "none", "hadamard", "random", "lowrank:1", "lowrank:64"):
        check(name, "--kv-transform-k")
    for name in ("lowpass", "lowrank", "lowrank:", "lowrank:0", "lowrank:-1", "lowrank:x", ""):
        with pytest.raises(ConfigError, match=f"--kv-transform-k '{name}' is unknown: it is none"):
            check(name, "--kv-transform-k")
