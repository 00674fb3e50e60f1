"""Tokens per second with each cache type, beside our own f16 and beside llama.cpp's same types."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

import pykv
from benchmarks import bars, llamacpp
from benchmarks.caches import BASE, cache_of, models_of, say, with_base
from benchmarks.report import Bar, Options, Result
from benchmarks.speed import Measure, after, compared, in_turn, their_generate, tokens_of
from pykv.engine import hub

DECODED = ("f16", "q8_0", "q4_0", "kivi2", "fp8_e4m3")
READ_BATCH = 512  # tokens that are read together
STEPS = 64  # of a sample: a page's tokens, so that exactly one of them encodes pages
POSITION = "{} --kv-position read"


def _read(model: pykv.Model, ids: Sequence[int]) -> int:
    """A new sequence that holds these tokens; the logits after the last were computed."""
    sequence = model.store.new_sequence()
    for start in range(0, len(ids), READ_BATCH):
        part = np.array(ids[start : start + READ_BATCH], np.int32)
        last = [len(part) - 1] if start + len(part) == len(ids) else []
        model.step([(sequence, part)], np.array(last, np.int32))
    return sequence


def _decoding(
    options: Options, name: str, models: Mapping[str, pykv.Model], ids: Sequence[int], n: int
) -> dict[str, Measure]:
    """Ours by label; the tokens before are read now."""
    sides: dict[str, Measure] = {}
    for label, model in models.items():
        started = time.perf_counter()
        sequence = _read(model, ids)
        seconds = time.perf_counter() - started
        say(f"{name} {label}: {len(ids)} tokens read in {seconds:.1f} s")
        sides[label] = partial(after, model, sequence, n)
    return sides


def _state(options: Options, name: str, label: str, ids: Sequence[int]) -> Path:
    """Where llama.cpp's cache of these tokens is kept."""
    path = options.models[name].resolve()
    known = f"{path.stat().st_size} {llamacpp.version()} {list(ids)}"
    digest = hashlib.sha256(known.encode()).hexdigest()[:12]
    words = label.replace("/", "-")
    return hub.cache_dir() / "benchmarks" / f"{path.stem}.{words}.{len(ids)}.{digest}.state"


def _fill(options: Options, name: str, label: str, peer: llamacpp.Peer, ids: Sequence[int]) -> None:
    """Let llama.cpp hold the tokens: from a file of an earlier run, or read, and kept."""
    file, started = _state(options, name, label, ids), time.perf_counter()
    kept = not options.quick and file.exists()
    if kept:
        peer.restore(file)
    else:
        for start in range(0, len(ids), READ_BATCH):
            peer.read(ids[start : start + READ_BATCH])
        if not options.quick:
            peer.save(file)
    if peer.length != len(ids):
        raise RuntimeError(f"llama.cpp's cache holds {peer.length} tokens, not {len(ids)}")
    how, seconds = "restored" if kept else "read", time.perf_counter() - started
    say(f"{name} {label} of llama.cpp: {len(ids)} tokens {how} in {seconds:.1f} s")


def _peers(
    stack: ExitStack, options: Options, name: str, labels: Sequence[str], n_ctx: int
) -> dict[str, llamacpp.Peer]:
    """llama.cpp with each of the types that it has, if it is measured."""
    peers = {}
    for label in labels if compared(options) else ():
        types = cache_of(label).type_k, cache_of(label).type_v
        if all(llamacpp.has_type(t) for t in types):
            made = llamacpp.Peer(
                str(options.models[name]), n_ctx, options.threads, READ_BATCH, types
            )
            peers[label] = stack.enter_context(made)
    return peers


def decode(options: Options) -> Iterator[Result]:
    """Decoding after 4,096 tokens with each cache type, beside llama.cpp's and our own f16."""
    labels = options.types or DECODED
    n = options.size(STEPS, 4) + 1
    for name in options.subjects:
        for depth in options.tokens or (options.size(4096, 320),):
            ids, n_ctx = tokens_of(depth), depth + n + 1
            if options.prepare:
                _prepare(options, name, labels, ids, n_ctx)
                continue
            with ExitStack() as stack:
                models = models_of(stack, options, name, n_ctx, with_base(labels))
                sides = _decoding(options, name, models, ids, n)
                peers = _peers(stack, options, name, labels, n_ctx)
                for label, peer in peers.items():
                    _fill(options, name, label, peer, ids)
                    sides[_theirs(label)] = partial(their_generate, peer, n, depth)
                samples = in_turn(options.repeat, sides)
                yield from _decode_rows(name, depth, n - 1, models, samples)


def _theirs(label: str) -> str:
    return f"llama.cpp {label}"


def _prepare(
    options: Options, name: str, labels: Sequence[str], ids: Sequence[int], n_ctx: int
) -> None:
    for label in labels:
        with ExitStack() as stack:
            for peer in _peers(stack, options, name, [label], n_ctx).values():
                _fill(options, name, label, peer, ids)


def _decode_rows(
    name: str,
    depth: int,
    steps: int,
    models: Mapping[str, pykv.Model],
    samples: Mapping[str, list[float]],
) -> Iterator[Result]:
    for label, model in models.items():
        what = f"decode after {depth} tokens, {label}"
        notes = {"tokens": steps, "cache_bytes": model.store.nbytes, "plan": model.plan}
        others = samples.get(_theirs(label), [])
        if others:
            yield Result(
                "cache-decode", what, name, "tokens/s", samples[label], "llama.cpp, same types",
                others, notes, bars.at_least(bars.DECODE_PEER, name, depth, label),
            )  # fmt: skip
        if label != BASE:
            yield _beside_base(
                "cache-decode", what, name, label, samples, notes, bars.beside_f16(depth, label)
            )


def _beside_base(
    benchmark: str,
    what: str,
    name: str,
    label: str,
    samples: Mapping[str, list[float]],
    notes: dict[str, object],
    bar: Bar | None,
) -> Result:
    """A row of a cache against our own f16."""
    return Result(
        benchmark, what, name, "tokens/s", samples[label], "pykv, f16", samples[BASE], notes, bar
    )


def prompt(options: Options) -> Iterator[Result]:
    """Reading prompts of 512 and 4,096 tokens with each cache type, against our own f16."""
    caches = with_base(options.types or DECODED)

    def speed(model: pykv.Model, ids: Sequence[int]) -> float:
        started = time.perf_counter()
        sequence = _read(model, ids)
        seconds = time.perf_counter() - started
        model.store.free(sequence)
        return len(ids) / seconds

    for name in options.subjects:
        for n in options.tokens or ((160, 320) if options.quick else bars.PROMPT_LENGTHS):
            with ExitStack() as stack:
                models = models_of(stack, options, name, n + 1, caches)
                sides = {x: partial(speed, m, tokens_of(n)) for x, m in models.items()}
                samples = in_turn(options.repeat, sides)
            bar = Bar("≥", bars.PROMPT) if n in bars.PROMPT_LENGTHS else None
            for label in list(models)[1:]:
                yield _beside_base(
                    "cache-prompt", f"prompt of {n} tokens, {label}", name, label, samples, {}, bar
                )


def position(options: Options) -> Iterator[Result]:
    """Decoding after 4,096 tokens with keys that RoPE turns when they are read, against f16."""
    n = options.size(STEPS, 4) + 1
    turned = {
        label if label.startswith("nuq") else POSITION.format(label): cache_of(
            label, position="read"
        )
        for label in options.types or ("nuq4", "f16")
    }
    for name in options.subjects:
        for depth in options.tokens or (options.size(4096, 320),):
            with ExitStack() as stack:
                caches = {BASE: cache_of(BASE), **turned}
                models = models_of(stack, options, name, depth + n + 1, caches)
                sides = _decoding(options, name, models, tokens_of(depth), n)
                samples = in_turn(options.repeat, sides)
                for label in list(models)[1:]:
                    what = f"decode after {depth} tokens, {label}"
                    bar = bars.at_least(bars.POSITION, depth, label)
                    yield _beside_base("cache-position", what, name, label, samples, {}, bar)
