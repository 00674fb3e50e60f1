"""Perplexity through the cache, as a user's decoding would see it, and divergence from a baseline.

Source: llama.cpp tools/perplexity/perplexity.cpp, perplexity() and kl_divergence(): disjoint
chunks, the second half of each scored, the first token replaced by BOS where the vocabulary adds
one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32, I32, PAGE
from pykv.cache.layout import bands_of
from pykv.engine import keeping
from pykv.engine.divergence import F64, Divergence, Tally, log_softmax
from pykv.errors import ConfigError, NumericsError

if TYPE_CHECKING:
    from pykv.cache.store import Store
    from pykv.engine.logits_file import LogitsReader, LogitsWriter
    from pykv.engine.model import Model

log = logging.getLogger("pykv")

Progress = Callable[[int, int, float, float], None]
# chunks done, of, the figures of all chunks so far, seconds a chunk
DivergenceProgress = Callable[[int, int, Divergence, float], None]
# batches of rows of log-probabilities
Baseline = Generator[Iterable[F64 | F32], None, None]
LEAST_CHUNK = 4  # tokens; half of them are scored
LOGIT_FLOATS = 8 << 20  # logits that are held at a time


@dataclass(frozen=True)
class Perplexity:
    """exp(mean negative log-likelihood), its error, and the estimate after each chunk."""

    value: float
    error: float
    n_chunks: int
    n_tokens: int  # scored
    chunk_values: tuple[float, ...]


def negative_log_likelihoods(logits: F32, targets: I32) -> NDArray[np.float64]:
    """-ln softmax(logits)[target] for each row, logits f32 [T, V], in nats."""
    nll = np.empty(len(targets))
    for i, (row, target) in enumerate(zip(logits, targets, strict=True)):
        top = row.max()
        # infinity less infinity shows in the sum, and a far lower logit may well become -infinity
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.exp(row - top).sum(dtype=np.float64)
        nll[i] = np.log(total) - (float(row[target]) - float(top))
    if not np.isfinite(nll).all():
        raise NumericsError("the model's logits hold NaN or infinity; its file may be damaged")
    return nll


def chunks_of(
    model: Model, text: str | bytes, ctx_size: int = 512, chunks: int | None = None
) -> I32:
    """A text's tokens, i32 [chunks, ctx_size]; what is left over at its end is dropped.

    Raises ConfigError: the text is shorter than two chunks, a chunk does not fit the context, or
    `chunks` is none.
    """
    if ctx_size < LEAST_CHUNK:
        raise ConfigError(f"a chunk needs at least {LEAST_CHUNK} tokens, not {ctx_size}")
    if ctx_size > model.store.limit:
        raise ConfigError(
            f"a chunk of {ctx_size} tokens is longer than the context, {model.store.limit}"
        )
    _check_count(chunks)
    # the text gets no BOS of its own: each chunk's first token is replaced by one, the first's too
    ids = model.tokenizer.encode(text, add_special=False, parse_special=False)
    tokens = np.array(ids, np.int32)
    if len(tokens) < 2 * ctx_size:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, and two chunks of {ctx_size} are needed: "
            f"give a longer text or a smaller --ctx-size"
        )
    whole = len(tokens) // ctx_size
    return tokens[: whole * ctx_size].reshape(whole, ctx_size)[:chunks]


def _check_count(chunks: int | None) -> None:
    if chunks is not None and chunks < 1:
        raise ConfigError(f"chunks must be 1 or more, or None for all, not {chunks}")


def _warn_if_exact(model: Model, ctx_size: int) -> None:
    """Say so where a chunk ends before the cache has encoded enough of it to be measured."""
    bands = [b for b in bands_of(model.config, model.store.shapes) if not b.exact]
    if bands:
        residual, sinks = min(b.residual for b in bands), model.config.sinks
        if ctx_size <= sinks + residual + PAGE:
            log.warning(
                "the cache keeps %d first and %d newest tokens exact, and pages have %d: chunks of "
                "%d tokens show nothing of its types", sinks, residual, PAGE, ctx_size,
            )  # fmt: skip


def measure(
    model: Model,
    text: str | bytes,
    ctx_size: int = 512,
    chunks: int | None = None,
    progress: Progress | None = None,
    save_logits: LogitsWriter | None = None,
) -> Perplexity:
    """Perplexity of a text in chunks of `ctx_size` tokens.

    Raises ConfigError: see `chunks_of`, or the file of logits does not fit the disk;
    NumericsError: logits are not finite.
    """
    tokens = chunks_of(model, text, ctx_size, chunks)
    _warn_if_exact(model, ctx_size)
    if save_logits is not None:
        save_logits.begin(tokens, model.n_vocab)
    nll, values, started = [], [], time.perf_counter()
    for i, chunk in enumerate(tokens):
        with closing(_predictions(model, chunk)) as batches:
            for logits, targets in batches:
                nll.append(negative_log_likelihoods(logits, targets))
                if save_logits is not None:
                    save_logits.add(logits)
        value, _ = estimate(np.concatenate(nll))
        values.append(value)
        if progress is not None:
            progress(i + 1, len(tokens), value, (time.perf_counter() - started) / (i + 1))
    scored = np.concatenate(nll)
    value, error = estimate(scored)
    return Perplexity(value, error, len(tokens), len(scored), tuple(values))


def estimate(nll: NDArray[np.float64]) -> tuple[float, float]:
    """Perplexity and its standard error, as llama-perplexity computes them."""
    mean = nll.mean()
    variance = max((nll * nll).mean() - mean * mean, 0.0)
    value = float(np.exp(mean))
    return value, value * float(np.sqrt(variance / max(len(nll) - 1, 1)))


def compare(
    model: Model,
    store: Store,
    text: str | bytes,
    ctx_size: int = 512,
    chunks: int | None = None,
    progress: DivergenceProgress | None = None,
) -> Divergence:
    """The model's own cache against the same model on another store, chunk by chunk, in float32.

    Raises ConfigError: see `chunks_of`; NumericsError: logits are not finite.
    """
    tokens = chunks_of(model, text, ctx_size, chunks)

    def baseline(index: int) -> Baseline:
        with closing(_predictions(model, tokens[index], store)) as batches:
            for logits, _ in batches:
                yield map(log_softmax, logits)

    return _compare(model, tokens, baseline, progress)


def compare_with_file(
    model: Model,
    base: LogitsReader,
    chunks: int | None = None,
    progress: DivergenceProgress | None = None,
) -> Divergence:
    """The model's own cache against what a file says, on the file's tokens.

    Raises ConfigError: the file is another vocabulary's, or its chunks do not fit the context;
    NumericsError: logits are not finite.
    """
    extent = base.extent
    if extent.n_vocab != model.n_vocab:
        raise ConfigError(
            f"{base.path} was written with a vocabulary of {extent.n_vocab:,} tokens, and this "
            f"model's has {model.n_vocab:,}: use the same model"
        )
    if extent.n_ctx > model.n_ctx:
        raise ConfigError(
            f"{base.path} has chunks of {extent.n_ctx:,} tokens, and the context holds "
            f"{model.n_ctx:,}: give --ctx-size {extent.n_ctx}"
        )
    _check_count(chunks)
    if chunks is not None and chunks > extent.n_chunks:
        log.warning("%s has %d chunks, and %d were asked for", base.path, extent.n_chunks, chunks)

    def baseline(index: int) -> Baseline:
        first = extent.n_ctx // 2
        for start, stop in _scored(model, extent.n_ctx):
            yield base.read(index, start - first, stop - start)

    return _compare(model, base.tokens[:chunks], baseline, progress)


def _compare(
    model: Model,
    tokens: I32,
    baseline: Callable[[int], Baseline],
    progress: DivergenceProgress | None,
) -> Divergence:
    """`baseline(chunk)` gives its log-probabilities in batches as `_scored` cuts them."""
    _warn_if_exact(model, tokens.shape[1])
    tally, started = Tally(), time.perf_counter()
    for i, chunk in enumerate(tokens):
        with closing(_predictions(model, chunk)) as batches, closing(baseline(i)) as others:
            for (logits, targets), base in zip(batches, others, strict=True):
                tally.add(base, logits, targets)
        if progress is not None:
            seconds = (time.perf_counter() - started) / (i + 1)
            progress(i + 1, len(tokens), tally.result(i + 1), seconds)
    return tally.result(len(tokens))


def _scored(model: Model, n_ctx: int) -> list[tuple[int, int]]:
    """Where a chunk's scored part is cut, so that few logits are held at a time."""
    at_once = max(1, min(model.ubatch, LOGIT_FLOATS // model.n_vocab))
    first, last = n_ctx // 2, n_ctx - 1
    return [(start, min(start + at_once, last)) for start in range(first, last, at_once)]


def _predictions(
    model: Model, tokens: I32, store: Store | None = None
) -> Generator[tuple[F32, I32], None, None]:
    """A chunk's scored logits f32 [T, V] and targets [T], in batches; in a sequence of its own.

    `store` is another cache than the model's.
    """
    fed = tokens.copy()
    if model.tokenizer.add_bos and model.tokenizer.bos is not None:
        fed[0] = model.tokenizer.bos
    step = model.step if store is None else partial(model.step, store=store)
    held = model.store if store is None else store
    first, sequence = len(tokens) // 2, held.new_sequence()
    try:
        for start in range(0, first, model.ubatch):
            stop = min(start + model.ubatch, first)
            step([(sequence, fed[start:stop])], np.empty(0, np.int32))
        keeping.end_prompt(model, sequence, held)
        for start, stop in _scored(model, len(tokens)):
            rows = np.arange(stop - start, dtype=np.int32)
            yield step([(sequence, fed[start:stop])], rows), tokens[start + 1 : stop + 1]
    finally:
        held.free(sequence)
