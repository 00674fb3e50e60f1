"""How far a tested run's predictions are from a baseline's: every figure of llama-perplexity.

p is the baseline's probability, q the tested run's, x the token that the text goes on with; a
token's negative log-likelihoods are -ln p(x) and -ln q(x). Only a few numbers a token are kept,
never its logits.

The divergence of a token sums over what has ln p > -16 only, as llama-perplexity does, so that
figures against a baseline in memory and against one from a file are of the same quantity; a token's
may therefore be a little below zero.

Source: llama.cpp tools/perplexity/perplexity.cpp, log_softmax() and kl_divergence().
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32, I32
from pykv.errors import NumericsError

F64 = NDArray[np.float64]

FLOOR = -16.0  # ln p from which on down a token does not count
LEAST_FOR_ERRORS = 11  # tokens; fewer have no error
KLD_PERCENTILES = (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0)
DP_PERCENTILES = (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0)


@dataclass(frozen=True)
class Estimate:
    """A mean over the scored tokens, or what follows from means, and its standard error."""

    value: float
    error: float  # 0 where fewer than LEAST_FOR_ERRORS tokens were scored


@dataclass(frozen=True)
class Divergence:
    """The tested run (q) against the baseline (p), over all scored tokens.

    Percentiles map percent to value, 100 the largest and 0 the smallest token's, interpolated
    linearly. `dp` is q(x) - p(x).
    """

    n_chunks: int
    n_tokens: int  # scored
    perplexity: Estimate
    base_perplexity: Estimate
    correlation: float | None  # of the two likelihoods; None where one does not vary
    log_ratio: Estimate  # ln(perplexity / base_perplexity)
    ratio: Estimate
    difference: Estimate
    kld: Estimate  # nats
    kld_percentiles: dict[float, float]
    dp: Estimate
    dp_percentiles: dict[float, float]
    rms_dp: Estimate
    same_top: Estimate  # share of tokens whose likeliest successor is the same

    def to_dict(self) -> dict[str, Any]:
        """All figures, as numbers in nested dictionaries."""
        return asdict(self)


def log_softmax(logits: F32) -> F64:
    """Ln softmax of one row, f32 [V] -> f64 [V].

    Float64, because a normaliser rounded to float32 moves a token's divergence by about 5e-7.
    """
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity less infinity is NaN, which the caller finds
        wide -= wide.max()
        wide -= np.log(np.exp(wide).sum())
    return wide


class Tally:
    """Gathers tokens, a batch at a time, and tells where things stand."""

    def __init__(self) -> None:
        self._parts: list[F64] = []

    def add(self, base: Iterable[F64 | F32], logits: F32, targets: I32) -> None:
        """Some tokens more: the baseline's log-probabilities and the tested run's logits, [T, V].

        `base` is gone through once, a row at a time.

        Raises NumericsError: NaN or infinity among them.
        """
        figures = np.empty((5, len(targets)))
        for i, (log_p, row, target) in enumerate(zip(base, logits, targets, strict=True)):
            figures[:, i] = _token(log_p, log_softmax(row), int(target))
        if not np.isfinite(figures).all():
            raise NumericsError("the model's logits hold NaN or infinity; its file may be damaged")
        self._parts.append(figures)

    def result(self, n_chunks: int) -> Divergence:
        """The figures of all tokens so far; there must be one."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts, axis=1)]
        return statistics(self._parts[0], n_chunks)


def _token(log_p: F64 | F32, log_q: F64, target: int) -> tuple[float, float, float, float, float]:
    """-ln q(x), -ln p(x), the divergence in nats, q(x) - p(x), and whether the tops agree."""
    seen = log_p > FLOOR
    known = log_p[seen]
    with np.errstate(invalid="ignore"):
        kld = (np.exp(known) * (known - log_q[seen])).sum(dtype=np.float64)
    nll_q, nll_p = -float(log_q[target]), -float(log_p[target])
    change = np.exp(-nll_q) - np.exp(-nll_p)
    return nll_q, nll_p, float(kld), float(change), float(log_p.argmax() == log_q.argmax())


def statistics(tokens: F64, n_chunks: int) -> Divergence:
    """Every figure, from [5, n]: -ln q(x), -ln p(x), divergence, q(x) - p(x), same top (0 or 1)."""
    nll_q, nll_p, kld, dp, same = tokens
    ppl_q, ppl_p = float(np.exp(nll_q.mean())), float(np.exp(nll_p.mean()))
    log_ratio = float(nll_q.mean() - nll_p.mean())
    ratio = float(np.exp(log_ratio))
    # the errors of what is made of both runs are those of one mean over tokens: var(a q - b p) is
    # a^2 var(q) + b^2 var(p) - 2 a b cov(q, p), without its cancellation
    ratio_error = standard_error(nll_q - nll_p)
    rms = float(np.sqrt((dp * dp).mean()))
    spread = nll_q.std() * nll_p.std()
    covariance = ((nll_q - nll_q.mean()) * (nll_p - nll_p.mean())).mean()
    return Divergence(
        n_chunks=n_chunks,
        n_tokens=len(dp),
        perplexity=Estimate(ppl_q, ppl_q * standard_error(nll_q)),
        base_perplexity=Estimate(ppl_p, ppl_p * standard_error(nll_p)),
        correlation=float(covariance / spread) if spread > 0 else None,
        log_ratio=Estimate(log_ratio, ratio_error),
        ratio=Estimate(ratio, ratio * ratio_error),
        difference=Estimate(ppl_q - ppl_p, standard_error(ppl_q * nll_q - ppl_p * nll_p)),
        kld=Estimate(float(kld.mean()), standard_error(kld)),
        kld_percentiles=percentiles(kld, KLD_PERCENTILES),
        dp=Estimate(float(dp.mean()), standard_error(dp)),
        dp_percentiles=percentiles(dp, DP_PERCENTILES),
        rms_dp=Estimate(rms, standard_error(dp * dp) / (2 * rms) if rms > 0 else 0.0),
        # the binomial's: a share p has the variance p (1 - p)
        same_top=Estimate(float(same.mean()), standard_error(same, least=2)),
    )


def standard_error(values: F64, least: int = LEAST_FOR_ERRORS) -> float:
    """Of the mean of values [n]: sqrt(variance / (n - 1)); 0 for fewer than `least` of them."""
    n = len(values)
    return float(np.sqrt(values.var() / (n - 1))) if n >= least else 0.0


def percentiles(values: F64, percents: tuple[float, ...]) -> dict[float, float]:
    """Order statistics of values [n], interpolated linearly at percent / 100 * (n - 1)."""
    found = np.percentile(values, percents)
    return {percent: float(value) for percent, value in zip(percents, found, strict=True)}
