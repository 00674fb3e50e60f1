"""Linear maps that a page's keys or values go through, per head: x [T, D] -> x @ M [T, R].

Their pages hold the mapped channels; a query goes through the keys' map, and what comes out of the
values' pages is taken back with M.T. Sinks and tail are never mapped. Low-rank maps are a
calibration's: the leading right singular vectors of what a head's keys or values were.
Source: llama.cpp PR 21038 (Hadamard, without random signs); Ashkboos
et al. 2024, QuaRot, arXiv:2404.00456.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from pykv.backends.base import F32
from pykv.errors import ConfigError
from pykv.formats.coded import HeadNumbers

LEAST_BLOCK, MOST_BLOCK = 32, 256
LOWRANK = "lowrank:"
SEED = 0x70796B76  # part of the cache's format: pages are read with the matrix they were made with


def hadamard_block(d: int) -> int:
    """The largest power of two that divides d, at most 256; 0 if that is below 32."""
    block = min(d & -d, MOST_BLOCK)
    return block if block >= LEAST_BLOCK else 0


def check(transform: str, flag: str) -> None:
    """Raise ConfigError for a name that is no transform's."""
    rank = transform.removeprefix(LOWRANK)
    known = transform in ("auto", "none", "hadamard", "random") or (
        transform.startswith(LOWRANK) and rank.isascii() and rank.isdigit() and int(rank) > 0
    )
    if not known:
        raise ConfigError(
            f"{flag} '{transform}' is unknown: it is none, hadamard, random, auto, or lowrank:R "
            "with R channels to keep"
        )


def resolve(transform: str, preferred: str, d: int, flag: str) -> str:
    """What a head of width d gets: `preferred` is what the format wants under `auto`.

    Raises ConfigError: a width that has no Hadamard matrix.
    """
    if transform == "auto":
        fits = preferred != "hadamard" or hadamard_block(d)
        return preferred if fits else "random"
    if transform == "hadamard" and not hadamard_block(d):
        raise ConfigError(
            f"{flag} hadamard needs a head width that 32 divides, and this model's is {d}; "
            "random or auto take any width"
        )
    if width(transform, d) > d:
        raise ConfigError(f"{flag} {transform}: this model's heads have {d} channels, keep fewer")
    return transform


@cache
def matrix(transform: str, d: int) -> F32 | None:
    """The map of a head of width d, f32 [D, R], read-only; None: the values stay as they are."""
    if transform == "none":
        return None
    exact = _hadamard(d) if transform == "hadamard" else _random(d)
    made: F32 = exact.astype(np.float32)
    made.setflags(write=False)
    return made


def matrices(transform: str, d: int, numbers: Sequence[HeadNumbers]) -> F32 | None:
    """The maps of a layer's KV heads, f32 [G, D, R], or [1, D, R] where all share one; or None.

    Raises ConfigError: a low-rank map without its bases.
    """
    if not transform.startswith(LOWRANK):
        shared = matrix(transform, d)
        return None if shared is None else shared[None]
    bases = [n.basis for n in numbers if n.basis is not None]
    if not bases:
        raise ConfigError(f"the transform {transform} needs a calibration file's bases")
    return np.stack(bases)[:, :, : width(transform, d)]


def width(transform: str, d: int) -> int:
    """Channels that a head of width d has in the pages."""
    return int(transform.partition(":")[2]) if transform.startswith(LOWRANK) else d


def _hadamard(d: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    block = hadamard_block(d)
    one = np.ones((1, 1))
    while len(one) < block:
        one = np.block([[one, one], [one, -one]])
    return np.kron(np.eye(d // block), one / np.sqrt(block))


def _random(d: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Uniformly distributed over the orthogonal matrices: QR of a normal one, R's signs fixed."""
    normal = np.random.default_rng((SEED, d)).standard_normal((d, d))
    q, r = np.linalg.qr(normal)
    return q * np.sign(np.diag(r))
