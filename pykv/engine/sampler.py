"""How the next token is chosen: llama.cpp's chain of filters, then one draw.

The order is: suppressed tokens, penalties (repeat, frequency, presence), top-k, typical, top-p,
min-p, temperature, draw.  A temperature of 0 or less takes the first maximum right after the
penalties.  No step walks over a whole sorted vocabulary when few tokens can survive: with the
default settings the work is two passes over the logits and then arrays of about 40 values.

Source: llama.cpp common/sampling.cpp, common_sampler_init (order and defaults);
src/llama-sampler.cpp (top_k, typical, top_p, min_p, temp, penalties and dist; a draw takes two
words of MT19937, as there).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pykv.backends.base import Choice
from pykv.config import SamplingConfig
from pykv.engine.sampler_settings import settle
from pykv.errors import ConfigError, NumericsError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_BLOCKS = 4096  # maxima that are compared in the search for the top k
_MAX_K = _BLOCKS // 4  # beyond this many, the k-th block maximum is a poor bound
_NONE = np.empty(0, np.int64)
_NO_CHANGE = (np.empty(0, np.int64), np.empty(0, np.float32))


class Sampler:
    """Chooses tokens for one sequence: settings, what was said so far, and a random stream.

    The result depends on the logits, the history and the seed only.  `suppress` lists token ids
    that are never chosen.  Raises ConfigError and GGUFError as `settle` does, and ConfigError
    when nothing is left to choose from.
    """

    def __init__(
        self,
        config: SamplingConfig,
        metadata: Mapping[str, object],
        n_vocab: int,
        suppress: Sequence[int] = (),
    ) -> None:
        self.settings = settle(config, metadata)
        self.n_vocab = n_vocab
        self._suppress: I64 = np.unique(np.asarray(suppress, np.int64))
        self._suppress = self._suppress[(self._suppress >= 0) & (self._suppress < n_vocab)]
        if self._suppress.size >= n_vocab:
            raise ConfigError("every token of the vocabulary is suppressed: none can be chosen")
        self._history = array("q")
        self._random = np.random.RandomState(self.seed)

    @property
    def seed(self) -> int:
        """The seed in use, drawn or given."""
        return self.settings.seed

    @property
    def n_history(self) -> int:
        """How many tokens the penalties can look back on."""
        return len(self._history)

    def accept(self, ids: Iterable[int]) -> None:
        """Adds tokens to the history: the prompt's, and each chosen one."""
        self._history.extend(ids)

    def reset(self) -> None:
        """Forgets the history and starts the random stream again at the seed."""
        del self._history[:]
        self._random = np.random.RandomState(self.seed)

    def rewind(self, n: int) -> None:
        """Cuts the history to its first n tokens; the random stream goes on."""
        del self._history[n:]

    def fork(self) -> Sampler:
        """A sampler that goes on from here by itself: the same next draws, its own history."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._history = self._history[:]
        twin._random = np.random.RandomState()
        twin._random.set_state(self._random.get_state(legacy=False))
        return twin

    def sample(self, logits: F32) -> int:
        """One token id from f32 [V].  Raises NumericsError: a logit is NaN or infinite."""
        ids, probs = self.candidates(logits)
        if len(ids) == 1:
            return int(ids[0])
        total = np.cumsum(probs)
        target = self._uniform() * total[-1]
        # the minimum: rounding may reach the end; side="right" passes over probabilities of 0
        target = min(target, np.nextafter(total[-1], 0))
        return int(ids[np.searchsorted(total, target, side="right")])

    def choice(self) -> Choice:
        """The next draw, for a backend that draws tokens itself; `drawn` ends it."""
        s = self.settings
        state = self._random.get_state(legacy=False)
        uniform = self._uniform()
        self._random.set_state(state)  # a choice of one takes no random numbers
        seen = self._penalised()
        return Choice(
            s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p, s.repeat_penalty,
            s.presence_penalty, s.frequency_penalty, *seen, self._suppress, uniform,
        )  # fmt: skip

    def drawn(self, n_candidates: int) -> None:
        """A token was drawn by `choice`, out of so many."""
        if n_candidates > 1:
            self._uniform()

    def _uniform(self) -> float:
        """At least 0 and below 1, up to rounding."""
        low, high = self._random.randint(0, 2**32, size=2, dtype=np.uint32).tolist()
        return float((low + high * 2.0**32) * 2.0**-64)

    def candidates(self, logits: F32) -> tuple[I64, F64]:
        """What can be drawn: ids i64 [n] and their probabilities f64 [n], which sum to 1.

        At a temperature of 0 or less: one id.  Raises NumericsError: a logit is NaN or infinite.
        """
        x = np.ascontiguousarray(logits, np.float32)
        if x.shape != (self.n_vocab,):
            raise ValueError(f"logits must be f32 [{self.n_vocab}], not {list(x.shape)}")
        # every path looks at the maximum, which finds NaN and +infinity; this finds -infinity
        if not x.min() > -np.inf:
            raise NumericsError(_BROKEN)
        s = self.settings
        changed = self._changes(x)
        if s.temperature <= 0:
            best = x.argmax()
            _check_maximum(float(x[best]))
            # an unchanged logit above all changed ones
            if changed[0].size and (changed[1].max() >= x[best] or best in changed[0]):
                return _top(x, 1, changed)[0], np.ones(1)
            return np.array([best], np.int64), np.ones(1)
        if s.top_k <= 0 and s.typical_p >= 1:
            ids, values = self._untruncated(_applied(x, changed))
        else:
            ids, values = _top(x, s.top_k if s.top_k > 0 else x.size, changed)
            if s.typical_p < 1:
                keep = _typical(values, s.typical_p)
                ids, values = ids[keep], values[keep]
            if s.top_p < 1:
                n = _reach(np.cumsum(_softmax(values)), s.top_p)
                ids, values = ids[:n], values[:n]
            if s.min_p > 0:
                # logits fall, so what is kept is a prefix, and at least the first
                n = max(1, int((values >= _floor(values[0], s.min_p)).sum()))
                ids, values = ids[:n], values[:n]
        return ids, _softmax(values, s.temperature)

    def _untruncated(self, x: F32) -> tuple[I64, F64]:
        """top_p and min_p over the whole vocabulary: each keeps a prefix of the sorted logits."""
        s = self.settings
        top = x.max()
        _check_maximum(float(top))
        if s.min_p > 0:
            ids, values = _falling(x, np.flatnonzero(x >= min(_floor(top, s.min_p), top)))
        elif s.top_p >= 1:
            return np.arange(x.size), x.astype(np.float64)
        if s.top_p >= 1:
            return ids, values
        total = float(np.exp(x.astype(np.float64) - top).sum())
        k = x.size if s.min_p > 0 else _MAX_K
        while s.min_p <= 0:
            ids, values = _top(x, k, _NO_CHANGE)
            if k >= x.size or float(np.exp(values - top).sum()) >= s.top_p * total * (1 + 1e-9):
                break
            k *= 8
        n = _reach(np.cumsum(np.exp(values - top)) / total, s.top_p)
        return ids[:n], values[:n]

    def _penalised(self) -> tuple[I64, I64]:
        """Tokens whose logits penalties change, and how often each occurred."""
        if not self.settings.penalises or not self._history:
            return _NONE, _NONE
        history, last = np.frombuffer(self._history, np.int64), self.settings.repeat_last_n
        return np.unique(history if last < 0 else history[-last:], return_counts=True)

    def _changes(self, x: F32) -> tuple[I64, F32]:
        """Where penalties and suppression change a logit: ids i64 [n] and the new logits."""
        s, (ids, counts) = self.settings, self._penalised()
        if not ids.size:
            return self._suppress, np.full(self._suppress.size, -np.inf, np.float32)
        v = x[ids].astype(np.float64)
        v = np.where(v > 0, v / s.repeat_penalty, v * s.repeat_penalty)
        v -= counts * s.frequency_penalty + s.presence_penalty
        # an id may stand twice: the last change counts, and suppression comes last
        ids = np.concatenate([ids, self._suppress])
        v = np.concatenate([v, np.full(self._suppress.size, -np.inf)])
        with np.errstate(over="ignore"):
            return ids, v.astype(np.float32)


_BROKEN = (
    "the model's logits hold NaN or infinity, where finite numbers were expected: the file may be "
    "damaged, or a cache type too coarse for this model"
)


def _check_maximum(top: float) -> None:
    if not math.isfinite(top):
        raise NumericsError(_BROKEN)


def _floor(top: np.floating, min_p: float) -> np.float32:
    return np.float32(float(top) + math.log(min_p))


def _softmax(values: F64, temperature: float = 1.0) -> F64:
    with np.errstate(over="ignore"):  # a tiny temperature: the others get probability 0
        e = np.exp((values - values.max()) / temperature)
    probs: F64 = e / e.sum()
    return probs


def _reach(cumulated: F64, p: float) -> int:
    """How many of the first probabilities it takes to reach p; at least one."""
    return min(int(np.searchsorted(cumulated, p, side="left")) + 1, len(cumulated))


def _typical(values: F64, p: float) -> I64:
    """Places of the values nearest to the typical surprise, until they sum to more than p.

    The places come in rising order, so that falling logits stay so.
    """
    probs = _softmax(values)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = float((probs * np.where(probs > 0, surprise, 0)).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n = int(np.searchsorted(np.cumsum(probs[order]), p, side="right")) + 1
    return np.sort(order[:n])


def _applied(x: F32, changed: tuple[I64, F32]) -> F32:
    """The logits with the changes in them; the caller's own array stays as it is."""
    if changed[0].size:
        x = x.copy()
        x[changed[0]] = changed[1]
    return x


def _falling(x: F32, ids: I64) -> tuple[I64, F64]:
    """Rising ids and their logits, highest first; of equal ones the lower id first."""
    values = x[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], values[order].astype(np.float64)


def _top(x: F32, k: int, changed: tuple[I64, F32]) -> tuple[I64, F64]:
    """The k highest logits of f32 [V]: ids i64 [<= k] and values f64, in falling order.

    Suppressed ones are left out.  n changed logits are never written back: the k + n highest of
    the old ones hold the k highest unchanged ones, and the changed ones are put beside them.
    Raises NumericsError: a logit is NaN or infinite.
    """
    wanted = k + changed[0].size
    if wanted > _MAX_K or x.size < 2 * _BLOCKS:
        x = _applied(x, changed)
        ids = np.arange(x.size)
        if k < x.size:
            ids = np.flatnonzero(x >= np.partition(x, x.size - k)[x.size - k])
    else:
        ids = _reaching(x, wanted)
        if changed[0].size:
            ids = np.union1d(ids, changed[0])
            places = np.searchsorted(ids, changed[0])
            few = x[ids]
            few[places] = changed[1]
            order, values = _falling(few, np.arange(ids.size))
            return _whole(ids[order][:k], values[:k])
    ids, values = _falling(x, ids)
    return _whole(ids[:k], values[:k])


def _whole(ids: I64, values: F64) -> tuple[I64, F64]:
    """Falling values without the suppressed end.  Raises NumericsError: nothing finite is left."""
    _check_maximum(float(values[0]))
    if values[-1] == -np.inf:
        n = int((values > -np.inf).sum())
        ids, values = ids[:n], values[:n]
    return ids, values


def _reaching(x: F32, k: int) -> I64:
    """Rising ids that hold the k highest logits, and few others.

    The vocabulary is laid out as columns.  A column's maximum is one of its own values, so the
    k-th highest column maximum is no higher than the k-th highest value, and only columns that
    reach it can hold one of the k.
    """
    rows = x.size // _BLOCKS
    body = x[: rows * _BLOCKS].reshape(rows, _BLOCKS)
    rest = x[rows * _BLOCKS :]
    maxima = body.max(axis=0)
    np.maximum(maxima[: rest.size], rest, out=maxima[: rest.size])
    bound = np.partition(maxima, _BLOCKS - k)[_BLOCKS - k]
    columns = np.flatnonzero(maxima >= bound)
    row, column = np.nonzero(body[:, columns] >= bound)
    ids = row * _BLOCKS + columns[column]
    if rest.size:
        ids = np.concatenate([ids, rows * _BLOCKS + np.flatnonzero(rest >= bound)])
    return ids
