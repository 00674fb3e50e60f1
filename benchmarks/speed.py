"""Tokens per second, pykv and llama.cpp in turn in one process, each on the same tokens."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

import pykv
from benchmarks import llamacpp
from benchmarks.report import Options, Result

PAUSE_S = 0.2  # lets the other side's threads, which wait actively for a while, go to sleep
GREEDY = pykv.SamplingConfig(temperature=0, ignore_eos=True)
Measure = Callable[[], float]


def in_turn(repeat: int, measures: Mapping[str, Measure]) -> dict[str, list[float]]:
    """Samples of each, taken in turn, in reverse every other round; one of each is dropped."""
    samples: dict[str, list[float]] = {side: [] for side in measures}
    for number in range(repeat + 1):
        for side in measures if number % 2 else reversed(measures):
            time.sleep(PAUSE_S)
            sample = measures[side]()
            if number:
                samples[side].append(sample)
    return samples


def alternate(
    repeat: int, ours: Measure, theirs: Measure | None
) -> tuple[list[float], list[float]]:
    """Samples of both, taken in turn."""
    sides = {"ours": ours} if theirs is None else {"ours": ours, "theirs": theirs}
    samples = in_turn(repeat, sides)
    return samples["ours"], samples.get("theirs", [])


def load(
    options: Options,
    name: str,
    n_ctx: int,
    threads: int | None = None,
    cache: pykv.CacheConfig | None = None,
) -> pykv.Model:
    """One of the two models; None: with the default cache."""
    config = pykv.LoadConfig(ctx_size=n_ctx, threads=threads or options.threads)
    return pykv.load(options.models[name], load=config, cache=cache)


def compared(options: Options) -> bool:
    """Whether llama.cpp is measured too."""
    return llamacpp.available() and not options.alone


def peer(options: Options, name: str, n_ctx: int, threads: int | None = None) -> Any:
    """The same model in llama.cpp, or a context that gives None."""
    if not compared(options):
        return nullcontext(None)
    return llamacpp.Peer(str(options.models[name]), n_ctx, threads or options.threads)


def tokens_of(n: int) -> list[int]:
    """Ordinary tokens that both vocabularies have."""
    return [int(i) for i in np.random.default_rng(0).integers(100, 40_000, n)]


def generate(model: pykv.Model, n: int, sampling: pykv.SamplingConfig = GREEDY) -> float:
    """Tokens per second of `Model.generate`: n tokens drawn, n - 1 read."""
    generation = model.generate(tokens_of(1), max_tokens=n, sampling=sampling)
    for _ in generation:
        pass
    return (n - 1) / generation.stats.generated_seconds


def their_generate(other: llamacpp.Peer, n: int, kept: int = 0) -> float:
    """The same in llama.cpp, after `kept` tokens of its cache."""
    other.truncate(kept)
    other.read(tokens_of(1))
    started = time.perf_counter()
    for _ in range(n - 1):
        other.read([other.greedy()])
    other.greedy()
    return (n - 1) / (time.perf_counter() - started)


def decode(options: Options) -> list[Result]:
    """Greedy decoding from an empty cache."""
    n, results = options.size(64, 4), []
    for name in options.subjects:
        with load(options, name, 1024) as model, peer(options, name, 1024) as other:
            theirs = (lambda o=other: their_generate(o, n)) if other else None
            ours, others = alternate(options.repeat, lambda m=model: generate(m, n), theirs)
            results.append(
                Result("decode", "decode, empty cache, greedy", name, "tokens/s", ours,
                       "llama.cpp" if others else "", others, {"tokens": n, "plan": model.plan})
            )  # fmt: skip
    return results


def sampler(options: Options) -> list[Result]:
    """A step with the default sampler against a greedy one, on a vocabulary of 262,144."""
    n = options.size(64, 4)
    drawn = pykv.SamplingConfig(seed=1, ignore_eos=True)
    with load(options, "gemma3", 1024) as model:
        ours, others = alternate(
            options.repeat,
            lambda: 1000 / generate(model, n, drawn),
            lambda: 1000 / generate(model, n),
        )
    return [
        Result("sampler", "a step with the default sampler", "gemma3", "ms", ours,
               "pykv, greedy", others, {"tokens": n})
    ]  # fmt: skip


def prompt(options: Options) -> list[Result]:
    """Reading a prompt of 512 tokens, up to the logits after the last."""
    n, results = options.size(512, 32), []
    ids, last = np.array(tokens_of(n), np.int32), np.array([n - 1], np.int32)

    def ours_of(model: pykv.Model) -> float:
        sequence = model.store.new_sequence()
        started = time.perf_counter()
        model.step([(sequence, ids)], last)
        seconds = time.perf_counter() - started
        model.store.free(sequence)
        return n / seconds

    def theirs_of(other: llamacpp.Peer) -> float:
        other.truncate(0)
        started = time.perf_counter()
        other.read(ids.tolist())
        other.greedy()
        return n / (time.perf_counter() - started)

    for name in options.subjects:
        with load(options, name, 1024) as model, peer(options, name, 1024) as other:
            theirs = (lambda o=other: theirs_of(o)) if other else None
            ours, others = alternate(options.repeat, lambda m=model: ours_of(m), theirs)
            results.append(
                Result("prompt", f"prompt of {n} tokens", name, "tokens/s", ours,
                       "llama.cpp" if others else "", others)
            )  # fmt: skip
    return results


def long(options: Options) -> list[Result]:
    """Decoding after 4,096 tokens in an f16 cache."""
    n, before, results = options.size(32, 4), options.size(4096, 256), []
    for name in options.subjects:
        with load(options, name, before + 512) as model, peer(options, name, before + 512) as other:
            ids, sequence = tokens_of(before), model.store.new_sequence()
            for start in range(0, before, 256):
                part = np.array(ids[start : start + 256], np.int32)
                model.step([(sequence, part)], np.array([len(part) - 1], np.int32))
                if other:
                    other.read(part.tolist())
            theirs = (lambda o=other: their_generate(o, n, before)) if other else None
            ours, others = alternate(
                options.repeat, lambda m=model, s=sequence: after(m, s, n), theirs
            )
            results.append(
                Result("long", f"decode after {before} tokens, f16 cache", name, "tokens/s", ours,
                       "llama.cpp" if others else "", others, {"tokens": n})
            )  # fmt: skip
    return results


def after(model: pykv.Model, sequence: int, n: int) -> float:
    """Tokens per second of greedy decoding after a sequence, which stays as it is."""
    fork, row = model.store.fork(sequence), np.zeros(1, np.int32)
    logits = model.step([(fork, np.array(tokens_of(1), np.int32))], row)
    started = time.perf_counter()
    for _ in range(n - 1):
        logits = model.step([(fork, logits.argmax(-1).astype(np.int32))], row)
    logits.argmax()
    seconds = time.perf_counter() - started
    model.store.free(fork)
    return (n - 1) / seconds


# it ends with the process that started it, however that ends
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def busy(options: Options) -> list[Result]:
    """Decoding with 2 threads beside a busy process, against one thread beside it."""
    n, name, results = options.size(32, 4), "smollm2", []
    with load(options, name, 512, 2) as two, load(options, name, 512, 1) as one, busy_core():
        ours, others = alternate(options.repeat, lambda: generate(two, n), lambda: generate(one, n))
        results.append(
            Result("busy", "decode beside a busy process, -t 2", name, "tokens/s", ours,
                   "pykv -t 1", others)
        )  # fmt: skip
    if compared(options):
        with peer(options, name, 512, 2) as two, peer(options, name, 512, 1) as one, busy_core():
            ours, others = alternate(
                options.repeat, lambda: their_generate(two, n), lambda: their_generate(one, n)
            )
            results.append(
                Result("busy", "the same in llama.cpp (not pykv)", name, "tokens/s", ours,
                       "llama.cpp -t 1", others)
            )  # fmt: skip
    return results
