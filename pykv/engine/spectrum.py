"""Singular values of a layer's keys and values by KV head, and how few channels hold them.

A head's keys or values are a matrix X [T, D], not centred, as low-rank maps see it. The squares of
its singular values are the eigenvalues of X^T X, which is summed in float64 token after token, so
that no text is too long; what lies below 1e-8 of the largest value is lost in that. Their sum is
the matrix's energy, and the R largest are what the R leading singular vectors keep of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32

F64 = NDArray[np.float64]
KEPT = 0.99  # share of the energy that a rank is told for


def second_moments(x: F32) -> F64:
    """Sums of x x^T over the tokens of each head, [T, G, D] -> f64 [G, D, D]."""
    heads = x.astype(np.float64).transpose(1, 0, 2)
    return heads.transpose(0, 2, 1) @ heads


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values of each head's keys or values, falling, f64 [G, D]."""

    singular: F64

    @classmethod
    def of(cls, moments: F64) -> Spectrum:
        """From second moments, f64 [G, D, D]."""
        # rounding leaves a matrix of lower rank eigenvalues a little below zero
        return cls(np.sqrt(np.maximum(np.linalg.eigvalsh(moments)[:, ::-1], 0)))

    def kept(self) -> F64:
        """The share of a head's energy that its 1, 2, ... D leading channels keep, [G, D]."""
        sums = np.square(self.singular).cumsum(1)
        all_of_it = sums[:, -1:]
        shares: F64 = np.divide(sums, all_of_it, out=np.ones_like(sums), where=all_of_it > 0)
        return shares

    def ranks(self, share: float = KEPT) -> list[int]:
        """How many channels each head needs to keep that share; 1 at least."""
        return [int(n) + 1 for n in (self.kept() < share).sum(1)]
