"""One sequence of tokens in the cache, and text that is generated after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pykv.backends.base import F32, I32
from pykv.config import SamplingConfig
from pykv.engine.sampler import Sampler
from pykv.engine.stats import Finish, Stats
from pykv.errors import CacheFullError, CancelledError, ConfigError

if TYPE_CHECKING:
    from pykv.engine.model import Model


T = TypeVar("T")
NO_OUTPUTS = np.empty(0, np.int32)
Prompt = str | bytes | Sequence[int]  # a text, or token ids


class Session:
    """The tokens of a sequence.  Its pages go back when it is freed or dropped."""

    _number: int | None = None  # None: freed

    def __init__(self, model: Model) -> None:
        self._model = model
        self._fed: list[int] = []  # tokens handed to the model
        self.unread: list[int] = []  # drawn last by `generate`; the next read begins with it
        self._number = model.store.new_sequence()

    def __len__(self) -> int:
        return 0 if self._number is None else self._model.store.length(self._number)

    @property
    def tokens(self) -> list[int]:
        """The tokens that the cache holds."""
        # an interrupt may come before or after a batch counts; the store knows which
        return self._fed[: len(self)]

    def fork(self) -> Session:
        """Another session with the same tokens, sharing their pages.

        Raises ConfigError: the cache's policy lets heads keep tokens of their own.
        """
        other = object.__new__(Session)
        other._model, other._fed, other.unread = self._model, self.tokens, list(self.unread)
        if self._number is not None:
            other._number = self._model.store.fork(self._number)
        return other

    def free(self) -> None:
        """Give back the pages; the session is of no more use."""
        number, self._number = self._number, None
        if number is not None and not self._model.closed:
            self._model.store.free(number)

    def __del__(self) -> None:
        self.free()

    def begin_prompt(self) -> None:
        """What is read from here on is a prompt, until `end_prompt`.  A new session begins one."""
        if self._number is not None:
            self._model.store.begin_prompt(self._number)

    def end_prompt(self) -> None:
        """The prompt was read to its end: here policies act that act once, as snapkv does."""
        if self._number is not None:
            self._model.end_prompt(self._number)

    def truncate(self, n: int) -> int:
        """Go back to n tokens, or to fewer where the cache cannot; returns how many stay.

        Raises ConfigError: n is below 0.
        """
        if n < 0:
            raise ConfigError(f"a session cannot go back to {n} tokens; give 0 or more")
        self.unread = []
        if self._number is not None and n < len(self):
            self._model.store.truncate(self._number, n)
        return len(self)

    def read(self, tokens: Sequence[int], cancelled: Callable[[], bool] | None = None) -> F32:
        """Add tokens, one at least; returns the logits [V] after the last.

        The token that `generate` drew last comes before them.
        Raises CacheFullError, CancelledError, NumericsError: whole batches that were read stay.
        """

        def run(batch: tuple[int, I32]) -> F32:
            last = np.array([len(batch[1]) - 1], np.int32)
            logits: F32 = self._model.step([batch], last, cancelled)[0]
            return logits

        return self._read(tokens, run, run)

    def draw(
        self,
        tokens: Sequence[int],
        sampler: Sampler,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        """Add tokens as `read` does; returns the token that the sampler draws after the last."""
        return self._read(
            tokens,
            lambda batch: self._model.step([batch], NO_OUTPUTS, cancelled),
            lambda batch: self._model.draw(batch, sampler, cancelled),
        )

    def _read(
        self,
        tokens: Sequence[int],
        run: Callable[[tuple[int, I32]], object],
        run_last: Callable[[tuple[int, I32]], T],
    ) -> T:
        """Run all batches of the tokens; returns what the last one gives."""
        if self._number is None or not tokens:
            raise ConfigError("there is nothing to read: the prompt has no tokens")
        tokens = [*self.unread, *tokens]
        room = self._model.store.room(self._number)
        if len(tokens) > room:
            raise CacheFullError(
                f"the text is too long: {len(tokens):,} tokens are to be read, and {room:,} of the "
                f"context's {self._model.store.limit:,} are free; raise ctx_size (-c) or shorten it"
            )
        n, step = len(tokens), self._model.ubatch
        for start in range(0, n - 1 - (n - 1) % step, step):
            run(self._next(tokens[start : start + step]))
            self.unread = []  # among the first part's
        result = run_last(self._next(tokens[n - 1 - (n - 1) % step :]))
        self.unread = []
        return result

    def _next(self, tokens: Sequence[int]) -> tuple[int, I32]:
        """A batch of this sequence."""
        if self._number is None:
            raise ConfigError("the session was freed")
        self._fed[len(self) :] = tokens
        return self._number, np.asarray(tokens, np.int32)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        sampling: SamplingConfig | None = None,
    ) -> Generation:
        """Read a text or token ids, and continue them; an iterator of pieces of text.

        The session grows by the prompt and by what is generated; the last token joins the cache
        with what is read next. A text begins with the model's start token where the session is
        empty.
        Raises ConfigError; while iterating, CacheFullError and NumericsError.
        """
        ids = self._model.ids(prompt, start=len(self) == 0)
        return Generation(
            self._model, lambda: (self, ids), self._model.sampler(sampling), max_tokens=max_tokens,
            stop=stop, on_end=self._keep_last,
        )  # fmt: skip

    def _keep_last(self, generation: Generation) -> None:
        if generation.prompt_read:
            self.unread = generation.tokens[len(self) - generation.stats.prompt_tokens :]


class StopText:
    """Holds back text that may be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was met (it is not shown)."""
        held = self._held + text
        found = [i for i in (held.find(s) for s in self._stops) if i >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        keep = max((self._overlap(held, s) for s in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many characters at the end of `text` begin `stop`."""
        for n in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:n]):
                return n
        return 0

    def flush(self) -> str:
        """What is still held, at the end."""
        held, self._held = self._held, ""
        return held


class Generation:
    """An iterator of pieces of text.  `text`, `tokens` and `stats` grow while it runs.

    `start` opens the session and says what to read, once iteration begins. `on_end` is called
    once, after the last token, also when an error or `close` ends it, and takes the session over;
    without it the session is freed. `prompt_read`: whether there was an answer at all. Dropping a
    generation closes it.
    """

    _finish: Finish | None = "cancelled"  # why it ended; None: it goes on

    def __init__(
        self,
        model: Model,
        start: Callable[[], tuple[Session, Sequence[int]]],
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        keep_special: bool = False,
        on_end: Callable[[Generation], None] | None = None,
    ) -> None:
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 0):
            raise ConfigError(f"max_tokens must be 0 or more, or None, not {max_tokens!r}")
        self._model, self._start, self._sampler = model, start, sampler
        self._max, self._on_end = max_tokens, on_end
        self._stop = StopText((stop,) if isinstance(stop, str) else stop)
        self._decoder = model.tokenizer.stream(special=keep_special)
        self._cancelled, self._spent = False, 0.0  # seconds, the prompt's included
        self.session: Session | None = None  # None before the first piece
        self.text = ""
        self.tokens: list[int] = []
        self.prompt_read = self.stopped_by_text = False
        self._stats = Stats(seed=sampler.seed, **model.facts())
        self._finish = None

    @property
    def stats(self) -> Stats:
        """What it took so far."""
        return replace(
            self._stats, generated_tokens=len(self.tokens),
            generated_seconds=max(self._spent - self._stats.prompt_seconds, 0.0),
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._finish is not None:
            raise StopIteration
        piece, began = "", time.perf_counter()
        try:
            while self._finish is None and not piece:
                piece = self._advance()
                self.text += piece
        except BaseException:
            self.close()
            raise
        finally:
            self._spent += time.perf_counter() - began
        if self._finish is not None:
            self._conclude()
        if not piece:
            raise StopIteration
        return piece

    def cancel(self) -> None:
        """Stop soon; may be called from a signal handler or another thread."""
        self._cancelled = True

    def close(self) -> None:
        """Stop now; what was generated so far counts."""
        if self._finish is None:
            self._finish = "cancelled"
            self._conclude()

    def __del__(self) -> None:
        self.close()

    def _advance(self) -> str:
        """One token further; the text that may be shown then."""
        try:
            if self._cancelled:
                return self._ended("cancelled")
            if self._max == 0:
                self._take(lambda session, tokens: session.read(tokens, self._is_cancelled))
                self.prompt_read = True
                return self._ended("length")
            token = self._take(
                lambda session, tokens: session.draw(tokens, self._sampler, self._is_cancelled)
            )
        except CancelledError:
            return self._ended("cancelled")
        except CacheFullError:
            if not self.prompt_read:
                raise
            return self._ended("context")
        self.prompt_read = True
        if token in self._model.tokenizer.eog:
            return self._ended("stop")
        self._sampler.accept([token])
        self.tokens.append(token)
        shown, met = self._stop.push(self._decoder.push(token))
        if met:
            self._finish, self.stopped_by_text = "stop", True
        elif len(self.tokens) == self._max:
            shown += self._ended("length")
        return shown

    def _is_cancelled(self) -> bool:
        return self._cancelled

    def _take(self, use: Callable[[Session, Sequence[int]], T]) -> T:
        """What `use` makes of the session and the tokens that it has not read yet."""
        if self.session is not None:
            return use(self.session, self.tokens[-1:])
        began = time.perf_counter()
        self.session, prompt = self._start()
        before = [*self.session.tokens, *self.session.unread, *prompt]
        self._sampler.accept(before)
        cached, n = len(self.session), len(before)
        self._stats = replace(self._stats, prompt_tokens=n, cached_tokens=cached)
        self.session.begin_prompt()
        result = use(self.session, prompt)
        self.session.end_prompt()
        self._stats = replace(self._stats, prompt_seconds=time.perf_counter() - began)
        return result

    def _ended(self, finish: Finish) -> str:
        """Note down why it ended; returns what the decoder and the stop strings still hold."""
        shown, self.stopped_by_text = self._stop.push(self._decoder.flush())
        self._finish = "stop" if self.stopped_by_text else finish
        return shown + self._stop.flush()

    def _conclude(self) -> None:
        on_end, self._on_end = self._on_end, None
        if not self._model.closed:
            facts: dict[str, Any] = self._model.run_facts()
            self._stats = replace(self._stats, finish=self._finish, **facts)
            if on_end is not None:
                on_end(self)
            elif self.session is not None:
                self.session.free()
