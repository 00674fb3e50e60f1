"""Whether a cache still gives back what was read into it: a fact, hidden in a text and asked for.

A needle is a sentence with a name and a number that were drawn for it alone, put at the sentence
end that is nearest to a share of the text. The model reads the text and then a question that ends
where the number has to follow. The number's tokens are scored one by one, each given those before
it, through the cache: whether each is the likeliest, which is when greedy decoding gives the whole
number, and the mean of their log-probabilities.

All caches are asked the same things, and every needle has a sequence to itself.

Source: Kamradt 2023, needle in a haystack; the sentence and the question end alike, as in Hsieh et
al. 2024, RULER, arXiv:2404.06654, appendix B, so that small models can go on with it.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any

from pykv.cache import layout
from pykv.config import CacheConfig
from pykv.engine import filler, guard
from pykv.engine.divergence import log_softmax
from pykv.errors import ConfigError
from pykv.gguf import open_gguf

if TYPE_CHECKING:
    from pykv.engine.model import Model

LENGTHS = (512, 1024, 2048)  # tokens
DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)  # percent
AFTER, BEFORE = "after-question", "before-question"  # when the prompt ends
LEAST_TEXT = 64  # tokens around a needle, below which nothing is hidden

_FACT = "The secret number of {name} is {number}. "
_QUESTION = (
    "\n\nQuestion: What is the secret number of {name}?\nAnswer: The secret number of {name} is"
)
_DIGITS = 7
_NAMES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Dublin", "Hanoi", "Bergen", "Turin", "Nairobi",
    "Riga", "Accra", "Porto", "Kyoto", "Sofia", "Tunis", "Bogota", "Geneva", "Krakow", "Havana",
)  # fmt: skip
# up to where a sentence goes, with the blanks after it; a text without any is cut between words
_SENTENCE = re.compile(
    r"""[\s\S]{1,600}?(?:[.!?]["')\]”’»]*\s+|[。！？]+\s*|\n\s*\n|\Z)|[\s\S]{1,600}\s|[\s\S]{1,600}"""
)


@dataclass(frozen=True)
class Task:
    """A needle in its text, as token ids; `length` tokens hold all three parts."""

    length: int
    depth: float  # percent of the text
    document: Sequence[int]
    question: Sequence[int]
    answer: Sequence[int]
    number: str


@dataclass(frozen=True)
class Score:
    """What came of a task."""

    length: int
    depth: float
    exact: bool
    log_prob: float  # mean over the answer's tokens, nats
    cache_bytes: int  # of the sequence at its end
    f16_bytes: int  # its tokens as bare f16 values
    seconds: float


@dataclass(frozen=True)
class Cell:
    """Means over the needles of one length and depth."""

    n: int
    exact: float  # share
    log_prob: float


@dataclass(frozen=True)
class Grid:
    """All scores of one cache, or those that there were when it was interrupted."""

    name: str
    cache: CacheConfig
    scores: Sequence[Score]

    def cell(self, length: int, depth: float) -> Cell | None:
        """Of a length and a depth; None where no needle was scored."""
        return _mean([s for s in self.scores if (s.length, s.depth) == (length, depth)])

    @property
    def total(self) -> Cell | None:
        """Over all needles."""
        return _mean(self.scores)

    @property
    def largest(self) -> Score | None:
        """The score whose sequence was the longest."""
        return max(self.scores, key=lambda s: s.f16_bytes, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        total, largest = self.total, self.largest
        return {
            "setting": self.name,
            "cache": asdict(self.cache),
            "exact": None if total is None else total.exact,
            "log_prob": None if total is None else total.log_prob,
            "cache_bytes": None if largest is None else largest.cache_bytes,
            "cache_f16_bytes": None if largest is None else largest.f16_bytes,
            "needles": [asdict(score) for score in self.scores],
        }


def _mean(scores: Sequence[Score]) -> Cell | None:
    n = len(scores)
    if n == 0:
        return None
    return Cell(n, sum(s.exact for s in scores) / n, sum(s.log_prob for s in scores) / n)


def check(
    lengths: Sequence[int],
    depths: Sequence[float],
    needles: int,
    compress: str,
    caches: Iterable[CacheConfig],
) -> None:
    """Raise ConfigError for what is wrong whatever the model."""
    if not lengths or not depths:
        raise ConfigError("a grid needs one length and one depth at least")
    for length in lengths:
        if length < LEAST_TEXT:
            raise ConfigError(f"a length must be {LEAST_TEXT} tokens or more, not {length}")
    for depth in depths:
        if not 0 <= depth <= 100:
            raise ConfigError(f"a depth must be 0 to 100 percent of the text, not {depth:g}")
    if needles < 1:
        raise ConfigError(f"there must be 1 needle or more in each cell, not {needles}")
    if compress not in (AFTER, BEFORE):
        raise ConfigError(f"--compress '{compress}' is unknown: it is {AFTER} or {BEFORE}")
    for cache in caches:
        layout.check(cache)


def tasks(
    model: Model,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    needles: int = 1,
    text: str | None = None,
    seed: int = 0,
) -> list[Task]:
    """What is asked, by length, depth and needle; a text of its own is made where none is given.

    The same arguments give the same tasks.
    Raises ConfigError: a length does not fit the context, or is too short for a needle; or the
    text is too short for it.
    """
    made = []
    for length in lengths:
        if length > model.n_ctx:
            raise ConfigError(
                f"a length of {length:,} tokens does not fit the context, {model.n_ctx:,}: "
                "raise --ctx-size or leave it out"
            )
        for depth in depths:
            for needle in range(needles):
                # the text around the needle is the same at every depth
                around = filler.sentences(Random(f"{seed} {length} {needle}"))
                pieces = (s + " " for s in around) if text is None else _pieces(text)
                draw = Random(f"{seed} {length} {depth:g} {needle}")
                made.append(_task(model, length, depth, pieces, draw))
    return made


def _pieces(text: str) -> Iterator[str]:
    return (found[0] for found in _SENTENCE.finditer(text))


def _task(model: Model, length: int, depth: float, pieces: Iterator[str], draw: Random) -> Task:
    encode = model.tokenizer.encode
    name = draw.choice(_NAMES)
    number = str(draw.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))
    fact, question = _FACT.format(name=name, number=number), _QUESTION.format(name=name)
    own = len(encode(fact + question + " " + number))
    if length < own + LEAST_TEXT:
        raise ConfigError(
            f"a length of {length} tokens is too short: the needle and its question take {own}, "
            f"and the text around them {LEAST_TEXT} at least, so give {own + LEAST_TEXT} or more"
        )
    around, sizes, total = [], [], 0
    for piece in pieces:
        around.append(piece)
        sizes.append(len(encode(piece, add_special=False)))
        total += sizes[-1]
        if total >= length - own:
            break
    else:
        raise ConfigError(
            f"the text has {total:,} tokens, and a length of {length:,} needs {length - own:,}: "
            "give a longer text or a smaller length"
        )
    while True:
        document = _hide(fact, around, sizes, depth)
        whole = encode(document + question + " " + number)
        if len(whole) <= length:
            break
        # tokens of pieces do not add up to those of the text
        last, _ = around.pop(), sizes.pop()
        if not around:
            around, sizes = [last[: len(last) // 2]], [1]
    n_document = _common(encode(document), whole)
    n_prompt = _common(encode(document + question), whole)
    return Task(
        length, depth, whole[:n_document], whole[n_document:n_prompt], whole[n_prompt:], number
    )


def _hide(fact: str, around: Sequence[str], sizes: Sequence[int], depth: float) -> str:
    """The text with the fact after the piece whose end is nearest to that depth."""
    ends = [0, *accumulate(sizes)]
    target = ends[-1] * depth / 100
    after = bisect_left(ends, target)
    if after > 0 and target - ends[after - 1] <= ends[after] - target:
        after -= 1
    return "".join([*around[:after], fact, *around[after:]]).rstrip()


def _common(some: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    n = 0
    while n < min(len(some), len(other)) and some[n] == other[n]:
        n += 1
    return n


def settled(model: Model, caches: Sequence[CacheConfig]) -> list[CacheConfig]:
    """The caches as this model has them, with the guard's choices; it was loaded with the first.

    Raises ConfigError: one does not run, as without a calibration that it needs.
    """
    found = [model.config]
    for cache in caches[1:]:
        with open_gguf(model.path) as file:
            found.append(guard.guarded(cache, file, model.store.shapes))
        model._new_store(found[-1], 1)
    return found


def scores(
    model: Model, asked: Sequence[Task], cache: CacheConfig, compress: str = AFTER
) -> Iterator[Score]:
    """Each task's score on a cache that is settled, as soon as it is known.

    `compress`: when the prompt ends, which is when a policy that looks at it chooses what stays:
    after the question, as its authors do, or before it, when what will be asked is not known yet.
    In the first case the answer's first token is predicted from what was kept while reading, and
    the others from what is left.
    Raises OutOfMemoryError: a second cache does not fit; NumericsError.
    """
    with _on(model, cache):
        for task in asked:
            yield _score(model, task, compress)


@contextmanager
def _on(model: Model, cache: CacheConfig) -> Iterator[None]:
    """The model with another cache, and after the block with its own again."""
    store, config = model.store, model.config
    if cache == config:
        yield
        return
    other = model._another_store(cache, model.n_ctx)
    model._store, model.config = other, cache
    try:
        yield
    finally:
        if not model.closed:
            model._store = store
        model.config = config


def _score(model: Model, task: Task, compress: str) -> Score:
    began, session = time.perf_counter(), model.session()
    try:
        session.read(task.document)
        if compress == BEFORE:
            session.end_prompt()
        logits = session.read(task.question)
        if compress == AFTER:
            session.end_prompt()
        exact, total = True, 0.0
        for i, token in enumerate(task.answer):
            log_probs = log_softmax(logits)
            exact = exact and int(log_probs.argmax()) == token
            total += float(log_probs[token])
            if i + 1 < len(task.answer):
                logits = session.read([token])
        store = model.store
        cache_bytes, f16_bytes = store.nbytes, store.f16_nbytes
    finally:
        session.free()
    return Score(
        task.length, task.depth, exact, total / len(task.answer), cache_bytes, f16_bytes,
        time.perf_counter() - began,
    )  # fmt: skip
