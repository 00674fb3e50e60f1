"""Speed of prompts and of decoding, as llama-bench measures them, and the bytes behind it.

A case reads random tokens after others that are not timed, `n_depth` of them: `n_prompt` in
batches, or `n_gen` one by one. Nothing is drawn, so that the figure is the model's and the cache's.
Source: llama.cpp tools/llama-bench/llama-bench.cpp, test_prompt, test_gen and main.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import pykv
from pykv.backends.base import I32
from pykv.cache import layout
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.engine.memory import free_bytes
from pykv.errors import ConfigError
from pykv.gguf import open_gguf

if TYPE_CHECKING:
    from pykv.engine.model import Model

READ_BYTES = 512 << 20  # more than the CPU's caches hold
READ_PASSES = 5  # the fastest counts
_SEED = 0


@dataclass(frozen=True)
class Case:
    """What is timed, in tokens: a prompt or a generation, not both, after `n_depth` others."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def name(self) -> str:
        """As llama-bench spells it: `pp512`, `tg128 @ d4096`."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name

    @property
    def n_timed(self) -> int:
        """Tokens that are timed."""
        return self.n_prompt + self.n_gen

    @property
    def n_tokens(self) -> int:
        """Tokens in the cache at the end."""
        return self.n_depth + self.n_timed


def cases(prompts: Sequence[int], gens: Sequence[int], depths: Sequence[int]) -> list[Case]:
    """At each depth every prompt, then every generation; a length of 0 is left out.

    Raises ConfigError: nothing is left.
    """
    found = []
    for depth in depths:
        found += [Case(n, 0, depth) for n in prompts if n]
        found += [Case(0, n, depth) for n in gens if n]
    if not found:
        raise ConfigError("nothing is to be measured: give a prompt's length or a generation's")
    return found


@dataclass(frozen=True)
class Subject:
    """What a model file's header tells about the work of one step."""

    path: Path
    architecture: str
    n_params: int
    weight_bytes: int
    step_bytes: int  # weights that one step reads
    n_ctx: int | None  # tokens that the model was trained for


def subject(path: Path) -> Subject:
    """What a model file holds; no weight is read.  Raises GGUFError as `open_gguf` does."""
    with open_gguf(path) as file:
        architecture = file.get_str("general.architecture", "")
        step_bytes = file.nbytes
        embeddings = file.tensors.get("token_embd.weight")
        if embeddings is not None and "output.weight" in file.tensors:
            # one row of them is looked up; without an output matrix they are that matrix too
            step_bytes -= embeddings.nbytes - embeddings.nbytes // embeddings.shape[0]
        return Subject(
            path,
            architecture,
            sum(math.prod(t.shape) for t in file.tensors.values()),
            file.nbytes,
            step_bytes,
            file.get_int(f"{architecture}.context_length", None),
        )


def check(
    wanted: Sequence[Case], caches: Sequence[CacheConfig], model: Subject, ctx_size: int
) -> int:
    """The context in tokens that the cases need, or `ctx_size` where that is not 0.

    Raises ConfigError: a cache type is unknown, or a case does not fit the context.
    """
    for cache in caches:
        layout.check(cache)
    longest = max(wanted, key=lambda case: case.n_tokens)
    room = ctx_size or model.n_ctx or longest.n_tokens
    if longest.n_tokens > room:
        limit = f"and the context has {room:,}: raise -c"
        if not ctx_size:
            limit = f"and the model was trained for {room:,}: name a larger context with -c"
        raise ConfigError(
            f"{longest.name} needs {longest.n_tokens:,} tokens, {limit}, or measure less"
        )
    return ctx_size or longest.n_tokens


def read_bandwidth(threads: int) -> float:
    """Bytes a second at which that many threads read a large array together."""
    free = free_bytes()
    n_bytes = READ_BYTES if free is None else min(READ_BYTES, free // 4)
    # written, for pages that were never written may all be the same one; the maximum of
    # integers is the reduction that NumPy computes fastest
    data = np.ones(max(n_bytes // 8, threads), np.uint64)
    parts, seconds = np.array_split(data, threads), []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READ_PASSES):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - started)
    return data.nbytes / min(seconds)


@dataclass(frozen=True)
class Figures:
    """What one case took."""

    case: Case
    started: datetime
    samples_ns: tuple[int, ...]  # a repetition each, at least one
    cache_bytes: int  # `store.nbytes` at the end
    step_bytes: int | None  # weights and cache that a step reads, mean; None for prompts

    @property
    def samples_ts(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [self.case.n_timed * 1e9 / ns for ns in self.samples_ns]

    def roofline(self, bandwidth: float) -> float | None:
        """The time in which a step's bytes can be read, over the time that it took.

        `bandwidth` in bytes a second.  None for prompts, which arithmetic limits and not reading.
        """
        if self.step_bytes is None:
            return None
        seconds = statistics.mean(self.samples_ns) / 1e9 / self.case.n_gen
        return self.step_bytes / bandwidth / seconds


def measure(
    model: Model, wanted: Sequence[Case], repetitions: int, weight_step_bytes: int
) -> Iterator[Figures]:
    """Figures of the cases, those of a depth side by side, each as soon as it is there.

    The tokens before a case are read once a depth; a repetition goes on in a fork of them. Under a
    policy, which may forbid forks, each repetition reads them anew: they are a prompt then, and so
    is what a prompt's case reads, whose end is timed with it.
    Raises CacheFullError, NumericsError.
    """
    store = model.store  # also when the model has been closed meanwhile
    for depth, group in groupby(wanted, key=lambda case: case.n_depth):
        base = store.new_sequence() if store.policy is None else None
        try:
            if base is not None:
                _read(model, base, _tokens(model, 0, depth))
            for case in group:
                started = datetime.now(UTC)
                _run(model, store, base, case, warm_up=True)
                runs = [_run(model, store, base, case) for _ in range(repetitions)]
                held = runs[-1][1] if base is None else _cache_sizes(store, case, model.ubatch)
                per_step = weight_step_bytes + round(statistics.mean(held)) if case.n_gen else None
                yield Figures(case, started, tuple(ns for ns, _ in runs), held[-1], per_step)
        finally:
            if base is not None:
                store.free(base)


def _tokens(model: Model, start: int, stop: int) -> I32:
    """Random tokens for these positions; a text's first is the BOS where the vocabulary adds it."""
    ids = np.random.default_rng(_SEED + start).integers(0, model.n_vocab, stop - start)
    if start == 0 and stop and model.tokenizer.add_bos and model.tokenizer.bos is not None:
        ids[0] = model.tokenizer.bos
    return ids.astype(np.int32)


def _read(model: Model, sequence: int, ids: I32) -> None:
    """Read tokens in batches, up to the logits after the last."""
    for start in range(0, len(ids), model.ubatch):
        part = ids[start : start + model.ubatch]
        last = start + len(part) == len(ids)
        outputs = np.array([len(part) - 1] if last else [], np.int32)
        model.step([(sequence, part)], outputs)


def _run(
    model: Model, store: Store, base: int | None, case: Case, warm_up: bool = False
) -> tuple[int, list[int]]:
    """Nanoseconds of one repetition; without a base, which it forks, `nbytes` after each batch too.

    To warm up, a whole prompt is read or one token.
    """
    n = 1 if warm_up and case.n_gen else case.n_timed
    ids, at_once = _tokens(model, case.n_depth, case.n_depth + n), 1
    sequence = store.new_sequence() if base is None else store.fork(base)
    sizes = list[int]()
    try:
        if base is None:
            _read(model, sequence, _tokens(model, 0, 0 if warm_up else case.n_depth))
            model.end_prompt(sequence)
        if case.n_prompt:
            store.begin_prompt(sequence)
            at_once = model.ubatch
        started = time.perf_counter_ns()
        for start in range(0, n, at_once):
            part = ids[start : start + at_once]
            last = case.n_gen or start + len(part) == n
            outputs = np.array([len(part) - 1] if last else [], np.int32)
            model.step([(sequence, part)], outputs)
            if last and case.n_prompt:
                model.end_prompt(sequence)
            if base is None:
                paused = time.perf_counter_ns()
                sizes.append(store.nbytes)
                started += time.perf_counter_ns() - paused
        return time.perf_counter_ns() - started, sizes
    finally:
        store.free(sequence)


def _cache_sizes(store: Store, case: Case, at_once: int) -> list[int]:
    """`nbytes` of a store of this kind after each timed batch of a case, alone in it.

    Another store goes through the batches, and nothing is computed: pages that a repetition shares
    with the sequence that it was forked from, or has in its place, are not told apart by `nbytes`.
    """
    alike, none = Store(store.shapes, store.config, store.n_ctx), np.empty(0, np.int32)
    sequence, sizes = alike.new_sequence(), list[int]()
    for n, batch in ((case.n_depth, at_once), (case.n_timed, at_once if case.n_prompt else 1)):
        sizes = []
        for start in range(0, n, batch):
            alike.begin([(sequence, np.zeros(min(batch, n - start), np.int32))], none)
            alike.commit()
            sizes.append(alike.nbytes)
    return sizes


def threads_of(model: Model) -> int:
    """Threads that the model's backend runs on; 1 where it does not say."""
    return int(model.facts().get("threads", 1))


def record(model: Model, file: Subject, found: Figures, bandwidth: float) -> dict[str, Any]:
    """A row of the report as plain JSON values, with llama-bench's names where it has them.

    The cache's other settings have the prefix kv_.  `*_ns` are nanoseconds, `*_ts` tokens a second,
    `read_bandwidth` bytes a second, `roofline` a share of 1.
    """
    settings = asdict(model.config)
    types = {name: settings.pop(name) for name in ("type_k", "type_v")}
    rates, times = found.samples_ts, found.samples_ns
    return {
        "pykv_version": pykv.__version__,
        "model_filename": str(file.path),
        "model_type": file.architecture,
        "model_size": file.weight_bytes,
        "model_n_params": file.n_params,
        "backends": model.dev.name,
        "n_ubatch": model.ubatch,
        "n_threads": threads_of(model),
        **types,
        **{f"kv_{name}": value for name, value in settings.items()},
        "n_prompt": found.case.n_prompt,
        "n_gen": found.case.n_gen,
        "n_depth": found.case.n_depth,
        "test_time": found.started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.mean(times)),
        "stddev_ns": round(_deviation(times)),
        "avg_ts": statistics.mean(rates),
        "stddev_ts": _deviation(rates),
        "cache_bytes": found.cache_bytes,
        "step_bytes": found.step_bytes,
        "read_bandwidth": bandwidth,
        "roofline": found.roofline(bandwidth),
        "samples_ns": list(times),
        "samples_ts": rates,
    }


def _deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation; 0 for a single value."""
    return float(statistics.stdev(values)) if len(values) > 1 else 0.0
