"""One sequence of tokens in the cache, and text that is generated after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pykv.backends.base import F32
from pykv.engine.sampler import Sampler
from pykv.engine.stats import Finish, Stats
from pykv.errors import CacheFullError, CancelledError, ConfigError

if TYPE_CHECKING:
    from pykv.engine.model import Model


class Session:
    """A sequence's tokens and the logits after the last of them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._number = model.store.new_sequence()
        self.tokens: list[int] = []
        self.logits: F32 | None = None  # [V], after the last token

    def __len__(self) -> int:
        return len(self.tokens)

    def fork(self) -> Session:
        """Another session with the same tokens, sharing their pages."""
        other = object.__new__(Session)
        other._model, other.tokens, other.logits = self._model, list(self.tokens), self.logits
        other._number = self._model.store.fork(self._number)
        return other

    def free(self) -> None:
        """Give back the pages; the session is of no more use."""
        self._model.store.free(self._number)

    def truncate(self, n: int) -> int:
        """Go back to n tokens, or to fewer where the cache cannot; returns how many stay."""
        if n < len(self.tokens):
            kept = self._model.store.truncate(self._number, n)
            self.tokens, self.logits = self.tokens[:kept], None
        return len(self.tokens)

    def read(self, tokens: Sequence[int], cancelled: Callable[[], bool] | None = None) -> F32:
        """Add tokens; returns the logits [V] after the last.

        Raises CacheFullError, CancelledError: whole batches that were read stay.
        """
        room = self._model.n_ctx - len(self.tokens)
        if len(tokens) > room:
            raise CacheFullError(
                f"the text is too long: {len(tokens):,} tokens are to be read, and {room:,} of the "
                f"context's {self._model.n_ctx:,} are free; raise --ctx-size or shorten it"
            )
        for start in range(0, len(tokens), self._model.ubatch):
            part = np.asarray(tokens[start : start + self._model.ubatch], np.int32)
            last = np.array([len(part) - 1], np.int32)
            self.logits = self._model.step([(self._number, part)], last, cancelled)[0]
            self.tokens.extend(part.tolist())
        if self.logits is None:
            raise ConfigError("there is nothing to read: the prompt has no tokens")
        return self.logits


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
    """An iterator of pieces of text.  `text`, `tokens` and `stats` grow while it runs."""

    def __init__(
        self,
        model: Model,
        session: Session,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        keep_special: bool = False,
        history: Sequence[int] = (),
        on_end: Callable[[Generation], None] | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._model, self._session, self._prompt = model, session, prompt
        self._sampler, self._max = sampler, max_tokens
        self._stop, self._decoder = StopText(stop), model.tokenizer.stream(special=keep_special)
        self._on_end, self._on_failure = on_end, on_failure
        self._cancelled = False
        self.text = ""
        self.tokens: list[int] = []
        self.prompt_read = self.stopped_by_text = False
        self.stats = Stats(
            prompt_tokens=len(session) + len(prompt), cached_tokens=len(session),
            seed=sampler.seed, **model.facts(),
        )  # fmt: skip
        sampler.accept([*history, *session.tokens, *prompt])
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def cancel(self) -> None:
        """Stop soon; may be called from a signal handler or another thread."""
        self._cancelled = True

    def _run(self) -> Iterator[str]:
        started = time.perf_counter()
        try:
            logits = self._session.read(self._prompt, lambda: self._cancelled)
        except BaseException as error:
            if self._on_failure is not None:
                self._on_failure()
            if isinstance(error, CancelledError):
                self._finish("cancelled")
                return
            raise
        self.prompt_read = True
        self.stats = replace(self.stats, prompt_seconds=time.perf_counter() - started)
        started, finish = time.perf_counter(), "length"
        try:
            while self._max is None or len(self.tokens) < self._max:
                if self._cancelled:
                    finish = "cancelled"
                    break
                token = self._sampler.sample(logits)
                if token in self._model.tokenizer.eog:
                    finish = "stop"
                    break
                self._sampler.accept([token])
                self.tokens.append(token)
                shown, met = self._stop.push(self._decoder.push(token))
                self._count(started)
                if shown:
                    self.text += shown
                    yield shown
                if met:
                    finish, self.stopped_by_text = "stop", True
                    break
                if self._max is not None and len(self.tokens) >= self._max:
                    break
                try:
                    logits = self._session.read([token], lambda: self._cancelled)
                except CacheFullError:
                    finish = "context"
                    break
                except CancelledError:
                    finish = "cancelled"
                    break
            rest = "" if self.stopped_by_text else self._rest()
            self._count(started)
            if rest:
                self.text += rest
                yield rest
        except BaseException:
            self._finish("cancelled")
            raise
        self._finish(finish)

    def _rest(self) -> str:
        """What the decoder and the stop strings still hold."""
        shown, met = self._stop.push(self._decoder.flush())
        self.stopped_by_text = met
        return shown if met else shown + self._stop.flush()

    def _count(self, started: float) -> None:
        seconds = time.perf_counter() - started
        self.stats = replace(
            self.stats, generated_tokens=len(self.tokens), generated_seconds=seconds
        )

    def _finish(self, finish: str) -> None:
        known: dict[str, Finish] = {
            "stop": "stop", "length": "length", "context": "context", "cancelled": "cancelled",
        }  # fmt: skip
        self.stats = replace(self.stats, finish=known[finish], **self._model.cache_facts())
        if self._on_end is not None:
            ended, self._on_end = self._on_end, None
            ended(self)

    def close(self) -> None:
        """Stop now; what was generated so far counts."""
        self._pieces.close()  # type: ignore[attr-defined]
