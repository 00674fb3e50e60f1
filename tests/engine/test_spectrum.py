"""Spectra against NumPy's singular value decomposition of the matrix itself."""

import numpy as np
import pytest

from pykv.engine.spectrum import Spectrum, second_moments


def tokens(n=300, heads=3, d=24, rank=6, seed=0):
    """f32 [n, heads, d] of a hidden rank, with a mean and a little noise."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((n, heads, rank)) + 2
    x = np.einsum("tgr,grd->tgd", hidden, rng.standard_normal((heads, rank, d)))
    return (x + 0.01 * rng.standard_normal(x.shape)).astype(np.float32)


@pytest.mark.parametrize("n", [300, 10])  # 10 tokens span no more than 10 channels
def test_singular_values_are_those_of_the_matrix(n):
    x = tokens(n)
    found = Spectrum.of(second_moments(x))
    for g in range(3):
        singular = np.linalg.svd(x[:, g].astype(np.float64), compute_uv=False)
        expected = np.pad(singular, (0, 24 - len(singular)))
        np.testing.assert_allclose(found.singular[g], expected, atol=1e-6 * expected[0], rtol=1e-6)
        shares = np.square(expected).cumsum() / np.square(x[:, g], dtype=np.float64).sum()
        np.testing.assert_allclose(found.kept()[g], shares, rtol=1e-6)


def test_parts_of_a_text_add_up():
    x = tokens()
    parts = sum(second_moments(part) for part in np.split(x, [100, 101, 250]))
    np.testing.assert_allclose(
        Spectrum.of(parts).singular, Spectrum.of(second_moments(x)).singular, rtol=1e-9
    )


def test_a_rank_is_the_least_that_keeps_the_share():
    made = Spectrum(np.array([[8.0, 4, 1, 0], [3, 3, 0, 0]]))  # energies 64, 16, 1; 9, 9
    np.testing.assert_allclose(made.kept(), [[64 / 81, 80 / 81, 1, 1], [0.5, 1, 1, 1]])
    assert made.ranks(0.5) == [1, 1]  # as much is enough
    assert made.ranks(0.78) == [1, 2]
    assert made.ranks(0.98) == [2, 2]
    assert made.ranks() == [3, 2]
    assert made.ranks(1) == [3, 2]


def test_what_the_leading_vectors_leave_is_what_a_rank_does_not_keep():
    x = tokens()
    made = Spectrum.of(second_moments(x))
    for g, rank in enumerate(made.ranks()):
        assert rank <= 6  # what was planted; the noise has far less than 1 %
        basis = np.linalg.svd(x[:, g], full_matrices=False)[2][:rank].T
        left = x[:, g] - x[:, g] @ basis @ basis.T
        lost = np.square(left, dtype=np.float64).sum() / np.square(x[:, g], dtype=np.float64).sum()
        assert lost == pytest.approx(1 - made.kept()[g, rank - 1], rel=1e-3)
        assert lost <= 0.01


def test_a_silent_head_needs_one_channel():
    x = tokens()
    x[:, 1] = 0
    made = Spectrum.of(second_moments(x))
    assert made.ranks()[1] == 1
    assert made.kept()[1].tolist() == [1] * 24
