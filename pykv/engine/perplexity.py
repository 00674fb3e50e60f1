"""Perplexity through the cache, as a user's decoding would see it.

Source: llama.cpp tools/perplexity/perplexity.cpp, perplexity(): disjoint chunks, the second half of
each scored, the first token replaced by BOS where the vocabulary adds one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32, I32
from pykv.errors import ConfigError, NumericsError

if TYPE_CHECKING:
    from pykv.engine.model import Model

Progress = Callable[[int, int, float, float], None]
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


def measure(
    model: Model,
    text: str | bytes,
    ctx_size: int = 512,
    chunks: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of a text in chunks of `ctx_size` tokens.

    Raises ConfigError: the text is shorter than two chunks, a chunk does not fit the context, or
    `chunks` is none; NumericsError: logits are not finite.
    """
    if ctx_size < LEAST_CHUNK:
        raise ConfigError(f"a chunk needs at least {LEAST_CHUNK} tokens, not {ctx_size}")
    if ctx_size > model.n_ctx:
        raise ConfigError(f"a chunk of {ctx_size} tokens is longer than the context, {model.n_ctx}")
    if chunks is not None and chunks < 1:
        raise ConfigError(f"chunks must be 1 or more, or None for all, not {chunks}")
    # the text gets no BOS of its own: each chunk's first token is replaced by one, the first's too
    ids = model.tokenizer.encode(text, add_special=False, parse_special=False)
    tokens = np.array(ids, np.int32)
    if len(tokens) < 2 * ctx_size:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, and two chunks of {ctx_size} are needed: "
            f"give a longer text or a smaller --ctx-size"
        )
    n_chunks = len(tokens) // ctx_size
    n_chunks = min(n_chunks, chunks) if chunks is not None else n_chunks
    nll, values, started = [], [], time.perf_counter()
    for i in range(n_chunks):
        nll.append(_chunk(model, tokens[i * ctx_size : (i + 1) * ctx_size]))
        value, _ = estimate(np.concatenate(nll))
        values.append(value)
        if progress is not None:
            progress(i + 1, n_chunks, value, (time.perf_counter() - started) / (i + 1))
    scored = np.concatenate(nll)
    value, error = estimate(scored)
    return Perplexity(value, error, n_chunks, len(scored), tuple(values))


def estimate(nll: NDArray[np.float64]) -> tuple[float, float]:
    """Perplexity and its standard error, as llama-perplexity computes them."""
    mean = nll.mean()
    variance = max((nll * nll).mean() - mean * mean, 0.0)
    value = float(np.exp(mean))
    return value, value * float(np.sqrt(variance / max(len(nll) - 1, 1)))


def _chunk(model: Model, tokens: I32) -> NDArray[np.float64]:
    """The scored tokens' negative log-likelihoods, in a sequence of their own."""
    fed = tokens.copy()
    if model.tokenizer.add_bos and model.tokenizer.bos is not None:
        fed[0] = model.tokenizer.bos
    first, last = len(tokens) // 2, len(tokens) - 1
    at_once = max(1, min(model.ubatch, LOGIT_FLOATS // model.n_vocab))
    sequence, nll = model.store.new_sequence(), []
    try:
        for start in range(0, first, model.ubatch):
            stop = min(start + model.ubatch, first)
            model.step([(sequence, fed[start:stop])], np.empty(0, np.int32))
        for start in range(first, last, at_once):
            stop = min(start + at_once, last)
            rows = np.arange(stop - start, dtype=np.int32)
            logits = model.step([(sequence, fed[start:stop])], rows)
            nll.append(negative_log_likelihoods(logits, tokens[start + 1 : stop + 1]))
    finally:
        model.store.free(sequence)
    return np.concatenate(nll)
