"""One run of a backend's attention over coded pages against the reference backend's, at load.

A sequence is filled by the backend's kernels, and both go on with a fork of it, first by a few
tokens, then by a short prompt. So row kernels, prompt kernels and encoders each show in some of the
outputs. Where the reference cannot read the pages, as on a GPU, it fills a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pykv.backends import reference
from pykv.backends.base import (
    F32,
    I32,
    PAGE,
    Array,
    Backend,
    CacheFormats,
    LayerShape,
    Rope,
    Step,
)
from pykv.backends.threads import BlasThreads
from pykv.errors import NumericsError

SEED = 5
ROWS, PROMPT = 4, 12  # tokens of the two batches that are compared
# Of an output's length. A score is a sum of d products, of turned numbers that are sums of d more,
# each rounded to float32: at most 2 * d * 2**-24 times the products' sizes, for normal keys of 256
# channels 2 * 256 * 2**-24 * 0.64 * 256 / 16 = 3e-4. Roundings go up as often as down: seen in any
# format, with heads of 40 to 256, is 3e-6.
MOST_ERROR = 1e-4
# Where each has encoded a page of its own. The codes of a value within rounding of the middle
# between two may differ, which moves one channel of one token by a step: of 2 bits that is 1.3 of a
# normal key's deviations, a score by about 1.3 / sqrt(d), and an output by 1/128 of that.
MOST_ENCODED = 2e-2
# On a GPU tiles are multiplied as float16: queries, keys, weights and values are each off by 2**-11
# of themselves at most, up and down alike; seen in any format is 5e-4.
MOST_HALVES = 1e-2


class Cache(Protocol):
    """What the test needs of a store, which holds one layer."""

    sinks: int

    def new_sequence(self) -> int: ...  # noqa: D102
    def fork(self, sequence: int) -> int: ...  # noqa: D102
    def begin(self, batch: Sequence[tuple[int, I32]], outputs: I32) -> Step: ...  # noqa: D102
    def commit(self) -> None: ...  # noqa: D102


class _Attention:
    """A graph of one attention, over numbers that are made beforehand."""

    def __init__(self, dev: Backend, rope: Rope | None, numbers: list[F32]) -> None:
        self.dev, self._rope, self._numbers = dev, rope, numbers

    def forward(self, step: Step) -> Array:
        """The attention's output, [T, H * D]."""
        q, k, v = (self.dev.array(x[step.positions]) for x in self._numbers)
        return self.dev.attention(
            step, 0, q, k, v, self._rope, float(self._numbers[1].shape[2] ** -0.5)
        )

    def run(self, cache: Cache, sequence: int, count: int) -> F32:
        """Outputs of the next `count` tokens of a sequence, f32 [count, H * D]."""
        step = cache.begin(
            [(sequence, np.zeros(count, np.int32))], np.arange(count, dtype=np.int32)
        )
        out = self.dev.run(self, step)
        cache.commit()
        return out


def _numbers(shape: LayerShape, n: int) -> list[F32]:
    """Queries f32 [n, H, D], keys and values [n, G, D]."""
    rng = np.random.default_rng(SEED)
    heads = ((shape.n_head, shape.d_k), (shape.n_kv, shape.d_k), (shape.n_kv, shape.d_v))
    drawn = (rng.standard_normal((n, *head), np.float32) for head in heads)
    # eighths up to 4 are the same in every type of the tail
    return [(np.clip(np.rint(8 * x), -32, 32) / 8).astype(np.float32) for x in drawn]


def _rope(shape: LayerShape) -> Rope:
    n_rot = shape.d_k // 2 * 2
    return Rope(True, 10000.0 ** (-np.arange(0, n_rot, 2) / n_rot))


def one_head(shape: LayerShape) -> LayerShape:
    """A single KV head and its query heads, for which the same kernels serve."""
    return LayerShape(shape.n_head // shape.n_kv, 1, shape.d_k, shape.d_v, shared=shape.shared)


def check(
    dev: Backend,
    cache: Cache,
    shape: LayerShape,
    formats: CacheFormats,
    beside: Cache | None = None,
) -> None:
    """Raise NumericsError where the kernels of these formats disagree with the reference.

    `cache` is empty, has one layer of that shape, and encodes pages as soon as they are full;
    `beside` is another such, in the process's own memory, if `cache` is not.
    """
    filled = cache.sinks + 2 * PAGE - ROWS // 2  # the middle of the few tokens fills a page
    numbers = _numbers(shape, filled + ROWS + PROMPT)
    # keys that are turned when they are written would not be the same bits in both tails
    rope = _rope(shape) if formats.position == "read" else None
    ours, theirs = (_Attention(d, rope, numbers) for d in (dev, reference.create()))
    sequence, start = cache.new_sequence(), 0
    ours.run(cache, sequence, filled)
    if beside is not None:
        start = beside.new_sequence()
        theirs.run(beside, start, filled)
    for count in (ROWS, PROMPT):
        other = start if beside is not None else cache.fork(sequence)
        got = ours.run(cache, sequence, count).reshape(count, shape.n_head, -1)
        with BlasThreads().one():  # a second one costs these small products more than it gives
            expected = theirs.run(beside or cache, other, count).reshape(got.shape)
        most = np.full((count, 1), MOST_ERROR)
        if count == ROWS:
            most[ROWS // 2 :] = MOST_ENCODED
        if beside is not None:  # each has encoded every page by itself
            most[:] = MOST_ENCODED + MOST_HALVES
        with np.errstate(over="ignore", invalid="ignore"):  # wrong numbers may be of any size
            error = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        if not (error <= most).all():  # a NaN is no agreement either
            excess = np.nan_to_num(error / most, nan=np.inf)
            row, head = np.unravel_index(excess.argmax(), excess.shape)
            raise NumericsError(
                f"the {dev.name} kernels for {formats.page_k} keys, {formats.page_v} values, "
                f"heads of {shape.d_k} and {shape.d_v}, {shape.n_head} to a KV head, are wrong "
                f"here: their output in a test is {error[row, head]:.1e} off the reference's, and "
                f"{most[row, 0]:.0e} is allowed; report it as an issue of pykv, and use another "
                "cache type or --device reference"
            )
