"""Loading a model, and the one object that an application holds."""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pykv import registry
from pykv.backends.base import F32, I32, Backend, Step
from pykv.cache import layout
from pykv.cache.store import Store
from pykv.config import CacheConfig, LoadConfig, SamplingConfig
from pykv.engine import guard, hub, keeping, memory, numbers
from pykv.engine.chat import Chat, given_template
from pykv.engine.devices import LoadProgress, backend, warm_up
from pykv.engine.divergence import Divergence
from pykv.engine.logits_file import LogitsReader, LogitsWriter
from pykv.engine.perplexity import (
    DivergenceProgress,
    Perplexity,
    Progress,
    compare,
    compare_with_file,
    measure,
)
from pykv.engine.sampler import Sampler
from pykv.engine.session import Generation, Prompt, Session
from pykv.engine.vocabulary import load_tokenizer
from pykv.errors import CacheFullError, ConfigError
from pykv.gguf import GGUFFile, open_gguf
from pykv.tokenizer import from_metadata, select

log = logging.getLogger("pykv")


__all__ = ["Chat", "Divergence", "Generation", "Model", "Perplexity", "load", "load_tokenizer"]


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    cache: CacheConfig | None = None,
    load: LoadConfig | None = None,
    sampling: SamplingConfig | None = None,
    offline: bool = False,
    progress: LoadProgress | None = None,
) -> Model:
    """Load a model: a path, a name of the catalogue, `hf:user/repo[:quant]`; None: the default.

    `progress(stage, done, total)` is told of downloads and of kernels that are compiled.
    Raises PykvError: GGUFError for a file that cannot be read, DownloadError, OutOfMemoryError,
    UnsupportedError, ConfigError.
    """
    for given, kind in ((cache, CacheConfig), (load, LoadConfig), (sampling, SamplingConfig)):
        if not isinstance(given, kind | None):
            what = kind.__name__.removesuffix("Config").lower()
            raise ConfigError(f"{what} must be a {kind.__name__}, not {given!r}")
    path = hub.resolve(
        None if model is None else os.fspath(model), offline=offline, progress=progress
    )
    return Model(
        path, cache or CacheConfig(), load or LoadConfig(), sampling or SamplingConfig(), progress
    )


class Model:
    """A loaded model.  Use it from one thread at a time, and close it, or use `with`."""

    def __init__(
        self,
        path: Path,
        cache: CacheConfig,
        load: LoadConfig,
        sampling: SamplingConfig,
        progress: LoadProgress | None = None,
    ) -> None:
        started = time.perf_counter()
        self.path, self.config, self.load_config = path, cache, load
        self._sampling = sampling
        layout.check(cache)  # an unknown type is said before anything is read
        self._file: GGUFFile = open_gguf(path)
        self._dev: Backend | None = None
        self._store: Store | None = None
        try:
            self.metadata = self._file.metadata
            self.architecture: str = self._file.get_str("general.architecture")
            self.tokenizer = from_metadata(self.metadata, where=self._file.file)
            n_layer = self._file.get_int(f"{self.architecture}.block_count", 0)
            self._dev = backend(load, n_layer, progress)
            self._load_graph()
        except BaseException:
            self.close()
            raise
        self.load_seconds = time.perf_counter() - started

    def _load_graph(self) -> None:
        load, dev = self.load_config, self.dev
        key = self.architecture.replace("-", "_")
        graph_class = registry.find("models", key, "architecture").GRAPH
        self._graph = graph_class(self._file, self.tokenizer.n_vocab, dev)
        self.n_vocab, trained = self.tokenizer.n_vocab, self._graph.h.n_ctx
        self.n_ctx = load.ctx_size or trained
        if self.n_ctx > trained:
            log.warning(
                "%s was trained for %d tokens of context; beyond them its answers get worse",
                self._file.file, trained,
            )  # fmt: skip
        self.ubatch = min(load.ubatch, load.batch, self.n_ctx)
        self.config = guard.guarded(self.config, self._file, self._graph.shapes)
        self._store = self._new_store(self.config, self.n_ctx)
        self._check_memory(self.n_ctx, self.store.estimate)
        dev.prepare(self._graph.shapes, self.store.formats)
        self.store.memory.reserve(self.store.estimate(self.n_ctx))
        keeping.prepare(dev, self.store, self.tokenizer)
        guard.self_test(dev, self.store)
        warm_up(self)

    def _check_memory(self, n_ctx: int, cache_bytes: Callable[[int], int]) -> None:
        """Raise OutOfMemoryError: the model and so large a cache do not fit."""
        if not self.load_config.check_memory:
            return
        own, of_device = self.dev.own_bytes(self._graph.shapes, n_ctx), self.dev.free_bytes()
        free = memory.free_bytes() if of_device is None else of_device
        what = "memory" if of_device is None else "GPU memory (-ngl 0 takes the CPU)"
        scratch = own + memory.batch_bytes(self._graph.h, self.ubatch, self.n_vocab)
        memory.check(
            self._file.file, self._file.nbytes, scratch, n_ctx, cache_bytes, free, what=what
        )

    @property
    def dev(self) -> Backend:
        """The backend.  Raises ConfigError: the model was closed."""
        if self._dev is None:
            raise ConfigError("the model is closed; load it again")
        return self._dev

    @property
    def store(self) -> Store:
        """The cache.  Raises ConfigError: the model was closed."""
        if self._store is None:
            raise ConfigError("the model is closed; load it again")
        return self._store

    @property
    def closed(self) -> bool:
        """Whether the model was closed."""
        return self._store is None

    @property
    def plan(self) -> list[str]:
        """Which kernels and threads are in use, a line each."""
        return [*self.dev.plan, *keeping.plan(self.store)]

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; the model is of no more use."""
        dev, self._dev = self._dev, None
        self._graph = self._store = None  # their memory is the backend's to give back
        if dev is not None:
            dev.close()
        self._file.close()

    # running

    def step(
        self,
        batch: Sequence[tuple[int, I32]],
        outputs: I32,
        cancelled: Callable[[], bool] | None = None,
        store: Store | None = None,
    ) -> F32:
        """Read tokens of some sequences; logits f32 [len(outputs), V] of those rows.

        All of it counts or nothing does; `store` is another cache than the model's own.
        Raises CacheFullError, NumericsError, CancelledError.
        """
        with self._counted(batch, outputs, cancelled, store) as step:
            logits = self.dev.run(self._graph, step)
            guard.check_logits(logits, step)
        return logits

    def draw(
        self,
        batch: tuple[int, I32],
        sampler: Sampler,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        """Read tokens of a sequence as `step` does, and draw the next, on the device if it can."""
        last = np.array([len(batch[1]) - 1], np.int32)
        if not self.dev.chooses:
            return sampler.sample(self.step([batch], last, cancelled)[0])
        with self._counted([batch], last, cancelled) as step:
            chosen = self.dev.choose(self._graph, step, sampler.choice())
            if not chosen.finite:
                raise guard.bad_logits(step, 0)
        sampler.drawn(chosen.n_candidates)
        return chosen.token

    @contextmanager
    def _counted(
        self,
        batch: Sequence[tuple[int, I32]],
        outputs: I32,
        cancelled: Callable[[], bool] | None,
        store: Store | None = None,
    ) -> Iterator[Step]:
        """A batch that counts when the block ends, and leaves no trace when it raises."""
        store = self.store if store is None else store
        try:
            step = store.begin(batch, outputs)
            step.cancelled = cancelled
            yield step
        except BaseException:
            store.abort()
            raise
        store.commit()

    def sampler(self, sampling: SamplingConfig | None = None) -> Sampler:
        """A sampler with these settings, or the model's own."""
        config = sampling or self._sampling
        suppress = list(self.tokenizer.suppress)
        if config.ignore_eos:
            suppress += sorted(self.tokenizer.eog)
        return Sampler(config, self.metadata, self.n_vocab, suppress)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        sampling: SamplingConfig | None = None,
        parse_special: bool = False,
        keep_special: bool = False,
    ) -> Generation:
        """Continue a text, or token ids; the result is an iterator of pieces of text.

        `stop`: strings that end it. `parse_special`: control tokens spelled in the prompt become
        such. `keep_special`: control tokens in the answer are shown.
        Raises, while iterating: CacheFullError, NumericsError.
        """
        ids = self.ids(prompt, parse_special)
        return Generation(
            self, lambda: (Session(self), ids), self.sampler(sampling), max_tokens=max_tokens,
            stop=stop, keep_special=keep_special,
        )  # fmt: skip

    def session(self) -> Session:
        """An empty sequence of tokens, to read, fork and generate from."""
        return Session(self)

    def ids(self, prompt: Prompt, parse_special: bool = False, start: bool = True) -> list[int]:
        """Token ids of a prompt, checked; `start`: a text begins with the model's start token."""
        if isinstance(prompt, str | bytes):
            ids = self.tokenizer.encode(prompt, add_special=start, parse_special=parse_special)
        else:
            try:
                ids = [operator.index(i) for i in prompt]
            except TypeError as error:
                raise ConfigError(
                    f"the prompt must be text or token ids, not {type(prompt).__name__}: {error}"
                ) from error
            bad = [i for i in ids if not 0 <= i < self.n_vocab]
            if bad:
                raise ConfigError(
                    f"there is no token {bad[0]}: ids run from 0 to {self.n_vocab - 1}"
                )
        if not ids:
            raise ConfigError("the prompt has no tokens; give some text")
        return ids

    def chat(self, system: str | None = None, *, template: str | None = None) -> Chat:
        """A conversation.  `template`: a built-in name or Jinja source, in place of the model's.

        Raises TemplateError: the model has none, and none was given.
        """
        override = template if template is not None else given_template(self.load_config)
        return Chat(self, select(self.metadata, override, self._file.file), system)

    def logits(self, tokens: Sequence[int]) -> F32:
        """Logits f32 [tokens, V] of a text that starts here, read in batches.

        Raises ConfigError: no tokens, or ids out of range; CacheFullError.
        """
        ids = np.array(self.ids(list(tokens)), np.int32)
        if len(ids) > self.store.limit:
            raise CacheFullError(
                f"the text has {len(ids):,} tokens, and {self.store.limit:,} fit the context; "
                "raise ctx_size or shorten it"
            )
        out = np.empty((len(ids), self.n_vocab), np.float32)
        sequence = self.store.new_sequence()
        try:
            for start in range(0, len(ids), self.ubatch):
                part = ids[start : start + self.ubatch]
                rows = np.arange(len(part), dtype=np.int32)
                out[start : start + len(part)] = self.step([(sequence, part)], rows)
        finally:
            self.store.free(sequence)
        return out

    def perplexity(
        self,
        text: str | bytes,
        *,
        ctx_size: int = 512,
        chunks: int | None = None,
        progress: Progress | None = None,
        save_logits: LogitsWriter | None = None,
    ) -> Perplexity:
        """Perplexity of a text in chunks of `ctx_size` tokens, as llama-perplexity takes it.

        `progress(chunks done, of, running estimate, seconds a chunk)`. `save_logits` is given all
        logits, for `divergence`.
        Raises ConfigError: the text is too short, or the disk for its logits.
        """
        return measure(self, text, ctx_size, chunks, progress, save_logits)

    def divergence(
        self,
        text: str | bytes | None = None,
        *,
        base: LogitsReader | None = None,
        ctx_size: int = 512,
        chunks: int | None = None,
        progress: DivergenceProgress | None = None,
    ) -> Divergence:
        """How far this cache's predictions are from those of a default f16 cache beside it.

        With `base`, from a file's, whose tokens and chunks stand in the place of `text` and
        `ctx_size`. `progress(chunks done, of, figures so far, seconds a chunk)`.
        Raises ConfigError: the text is too short, the file is not this model's, or neither or both
        were given; OutOfMemoryError: the second cache does not fit.
        """
        if base is not None and text is None:
            return compare_with_file(self, base, chunks, progress)
        if base is not None or text is None:
            raise ConfigError("give either a text, or a file of logits, which has its own text")
        beside = self._another_store(CacheConfig(), ctx_size)
        return compare(self, beside, text, ctx_size, chunks, progress)

    def _new_store(self, cache: CacheConfig, n_ctx: int) -> Store:
        store = Store(self._graph.shapes, cache, n_ctx, self.dev.page_memory())
        store.numbers = numbers.of_cache(self._file, self.path, store.shapes, store.formats)
        return store

    def _another_store(self, cache: CacheConfig, n_ctx: int) -> Store:
        """A second cache for the same weights, its kernels ready."""
        shapes, store = self._graph.shapes, self._new_store(cache, n_ctx)
        if self.dev.free_bytes() is None:  # else what is loaded does not count as free any more
            self._check_memory(n_ctx, lambda n: self.store.estimate(n) + store.estimate(n))
        store.memory.reserve(store.estimate(n_ctx))
        self.dev.prepare(shapes, store.formats)
        keeping.prepare(self.dev, store, self.tokenizer)
        return store

    def end_prompt(self, sequence: int) -> None:
        """Let the cache's policy act, if it acts where a prompt ends.  Raises as `step`."""
        keeping.end_prompt(self, sequence)

    # reports

    def facts(self) -> dict[str, Any]:
        """Fields of Stats that do not change from run to run."""
        return {
            "load_seconds": self.load_seconds,
            "weight_bytes": self._file.nbytes,
            "plan": tuple(self.plan),
            **self.dev.facts(),
        }

    def run_facts(self) -> dict[str, Any]:
        """Fields of Stats that are known when a run ends: the backend's and the cache's."""
        return {
            **self.dev.facts(),
            "cache_bytes": self.store.nbytes,
            "cache_reserved_bytes": self.store.reserved_nbytes,
            "cache_peak_bytes": self.store.peak_nbytes,
            "cache_f16_bytes": self.store.f16_nbytes,
        }
