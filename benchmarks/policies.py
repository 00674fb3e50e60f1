"""What policies cost and save, beside the same model that keeps every token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

import pykv
from benchmarks.caches import say
from benchmarks.report import Bar, Options, Result
from benchmarks.speed import tokens_of
from pykv.backends.base import PAGE
from pykv.cache.store import Store

NONE = np.empty(0, np.int32)
READ_BATCH = 512  # tokens that are read together
STEPS = 32  # single tokens of a sample
STREAM, WARM = 1000, 2000  # tokens at the stream's end and start that are compared; those before


def _read(model: pykv.Model, store: Store, ids: Sequence[int]) -> tuple[int, float]:
    """A new sequence of these tokens, and the seconds that reading took."""
    sequence, started = store.new_sequence(), time.perf_counter()
    for start in range(0, len(ids), READ_BATCH):
        part = np.array(ids[start : start + READ_BATCH], np.int32)
        model.step([(sequence, part)], NONE, store=store)
    return sequence, time.perf_counter() - started


def _steps(model: pykv.Model, store: Store, sequence: int, ids: Sequence[int]) -> float:
    """Tokens per second, one after the other, with logits."""
    one, started = np.zeros(1, np.int32), time.perf_counter()
    for token in ids:
        model.step([(sequence, np.array([token], np.int32))], one, store=store)
    return len(ids) / (time.perf_counter() - started)


def _largest(model: pykv.Model, store: Store, sequence: int) -> int:
    """The most bytes in use over a page's worth of tokens, since pages come and go."""
    most = 0
    for token in tokens_of(PAGE):
        model.step([(sequence, np.array([token], np.int32))], NONE, store=store)
        most = max(most, store.nbytes)
    return most


def _load(options: Options, ctx_size: int) -> pykv.Model:
    load = pykv.LoadConfig(threads=options.threads, ctx_size=ctx_size, device="cpu")
    return pykv.load(options.models["smollm2"], load=load)


def policy_decode(options: Options) -> Iterator[Result]:
    """Decoding at 4,096 tokens under h2o with 20 %, and with statistics alone, against full f16."""
    n = options.size(4096, 256)
    with _load(options, 2 * n) as model:
        ids = tokens_of(n + STEPS * (options.repeat + 1))
        stores = {"full": model.store}
        for name, budget in (("h2o 20%", "20%"), ("statistics", str(4 * n))):
            cache = pykv.CacheConfig(policy="h2o", budget=budget)
            stores[name] = model._another_store(cache, 2 * n)
        sequences = {}
        for name, store in stores.items():
            sequences[name], seconds = _read(model, store, ids[:n])
            say(f"{name}: {n} tokens read in {seconds:.1f} s")
        full, kept = (stores[k].nbytes for k in ("full", "h2o 20%"))
        yield Result(
            "policy-decode", "h2o 20%: nbytes", "smollm2", "bytes", [float(kept)], "full f16",
            [float(full)], bar=Bar("≤", 0.25),
        )  # fmt: skip
        samples: dict[str, list[float]] = {name: [] for name in stores}
        for i in range(options.repeat + 1):
            part = ids[n + i * STEPS : n + (i + 1) * STEPS]
            # a step of each in turn: the machine's pace changes within a sample
            seconds_of: dict[str, list[float]] = {name: [] for name in stores}
            for token in part:
                for name, store in stores.items():
                    seconds_of[name].append(1 / _steps(model, store, sequences[name], [token]))
            if i:  # the first one notes programs down
                for name, times in seconds_of.items():
                    samples[name].append(1 / statistics.median(times))
        for name, limit in (("h2o 20%", 1.0), ("statistics", 1 / 1.1)):
            yield Result(
                "policy-decode", f"{name}, {n} tokens", "smollm2", "tokens/s", samples[name],
                "full f16", samples["full"], bar=Bar("≥", limit),
            )  # fmt: skip


def policy_prompt(options: Options) -> Iterator[Result]:
    """Reading a prompt of 2,048 tokens under h2o with 256, against no policy."""
    n = options.size(2048, 384)
    with _load(options, 2 * n) as model:
        ids = tokens_of(n)
        cache = pykv.CacheConfig(policy="h2o", budget="256")
        stores = [model._another_store(cache, 2 * n), model.store]
        samples: list[list[float]] = [[], []]
        for _ in range(options.repeat):
            for store, speeds in zip(stores, samples, strict=True):
                sequence, seconds = _read(model, store, ids)
                store.free(sequence)
                speeds.append(n / seconds)
        yield Result(
            "policy-prompt", f"h2o 256, {n} tokens", "smollm2", "tokens/s", samples[0], "full f16",
            samples[1], bar=Bar("≥", 0.3),
        )  # fmt: skip


def policy_stream(options: Options) -> Iterator[Result]:
    """100,000 tokens under sinks: the last thousand against tokens 2,000 to 3,000."""
    n, some = options.size(100_000, 600), options.size(STREAM, 100)
    with _load(options, 2048) as model:
        text = tokens_of(2048)
        store = model._another_store(pykv.CacheConfig(policy="sinks", budget="1024"), 2048)
        ids = (text * (n // len(text) + 1))[:n]
        warm = options.size(WARM, 200)
        sequence, _ = _read(model, store, ids[:warm])
        first = _steps(model, store, sequence, ids[warm : warm + some])
        before = _largest(model, store, sequence)
        for start in range(warm + some, n - some, READ_BATCH):
            part = np.array(ids[start : min(start + READ_BATCH, n - some)], np.int32)
            model.step([(sequence, part)], NONE, store=store)
        last = _steps(model, store, sequence, ids[n - some :])
        at_end = _largest(model, store, sequence)
        yield Result(
            "policy-stream", f"sinks 1024, the last of {n} tokens", "smollm2", "tokens/s", [last],
            "the first", [first], bar=Bar("≥", 0.9),
        )  # fmt: skip
        yield Result(
            "policy-stream", "sinks 1024: nbytes at the end", "smollm2", "bytes",
            [float(at_end)], "the start", [float(before)], bar=Bar("≤", 1.0), ratio_digits=4,
        )  # fmt: skip
