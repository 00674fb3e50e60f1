"""What a cache type costs in predictions, and what it saves in bytes: no times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pykv
from benchmarks import bars
from benchmarks.caches import BASE, cache_of, runnable, say, with_base
from benchmarks.report import Bar, Options, Result
from benchmarks.speed import load
from pykv.cache.layout import cache_types
from pykv.cache.store import Store
from pykv.engine.divergence import Divergence

MIB = 2**20
READ_BATCH = 512  # tokens that are read together
TEXT, REFERENCE = "wikitext2.test.txt", "reference.json"
GGML = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
# passes over the text by model, (chunks, tokens of each), and their types
PLAN: dict[str, dict[tuple[int, int], tuple[str, ...]]] = {
    "smollm2": {
        (16, 512): tuple(bars.PERPLEXITY["smollm2", (16, 512)]),
        (4, 2048): tuple(bars.PERPLEXITY["smollm2", (4, 2048)]),
    },
    "gemma3": {(16, 512): (*GGML, "kivi3", "kivi2")},
}
QUICK = (2, 320)
# the models' names in reference.json
REFERENCE_MODELS = {"smollm2": "smollm2-135m-instruct-q4_1", "gemma3": "gemma-3-270m-q4_k_m"}
REFERENCE_PASS = (16, 512)


def nbytes(options: Options) -> Iterator[Result]:
    """Bytes of the store at 4,096 tokens with each cache type, over those in f16."""
    for name in options.subjects:
        for n in options.tokens or (4096,):
            with load(options, name, n) as model:
                shapes = model.store.shapes
            labels = options.types or [t for t in cache_types() if t != BASE]
            base = _bytes(shapes, with_base(())[BASE], n)
            for label in labels:
                yield Result(
                    "cache-bytes", f"store at {n} tokens, {label}", name, "MiB",
                    [_bytes(shapes, cache_of(label), n) / MIB], "pykv, f16", [base / MIB],
                    bar=bars.at_most(bars.BYTES, name, n, label), ratio_digits=3,
                )  # fmt: skip


def _bytes(shapes: Sequence[Any], cache: pykv.CacheConfig, n: int) -> int:
    """`nbytes` of a store that n tokens went through; nothing is computed."""
    store, none = Store(shapes, cache, n), np.empty(0, np.int32)
    sequence = store.new_sequence()
    for start in range(0, n, READ_BATCH):
        store.begin([(sequence, np.zeros(min(READ_BATCH, n - start), np.int32))], none)
        store.commit()
    return store.nbytes


def _texts(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The text, and llama.cpp's figures, where they are known.  Exits without the text."""
    text, reference = folder / TEXT, folder / REFERENCE
    if not text.is_file():
        raise SystemExit(f"cache-quality: {text} is not here: give --data the folder that has it")
    if not reference.is_file():
        say(f"{reference} is not here: no figures of llama.cpp's")
        return text.read_bytes(), {}
    known: dict[str, Any] = json.loads(reference.read_text(encoding="utf-8"))["llama.cpp"]
    return text.read_bytes(), known


def _passes(options: Options, name: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Chunks and their tokens, with the types to measure there."""
    if options.quick and not options.passes:
        return {QUICK: options.types or ("q4_0", "nuq4")}
    planned = PLAN[name]
    every = tuple(dict.fromkeys(t for types in planned.values() for t in types))
    wanted = options.passes or tuple(planned)
    return {p: options.types or planned.get(p, every) for p in wanted}


def quality(options: Options) -> Iterator[Result]:
    """Perplexity over our own f16, and divergence from it, with each cache type; takes long."""
    if options.data is None:
        say(f"cache-quality is left out: give --data the folder with {TEXT}")
        return
    text, reference = _texts(options.data)
    for name in options.subjects:
        with load(options, name, READ_BATCH) as model:
            shapes = model.store.shapes
        for chunks, labels in _passes(options, name).items():
            caches = {label: cache_of(label) for label in labels if label != BASE}
            for label, cache in runnable(options, name, shapes, caches).items():
                yield from _measured(options, name, text, chunks, label, cache, reference)


def _measured(
    options: Options,
    name: str,
    text: bytes,
    chunks: tuple[int, int],
    label: str,
    cache: pykv.CacheConfig,
    reference: dict[str, Any],
) -> Iterator[Result]:
    """The rows of one type on one pass."""
    count, n_ctx = chunks
    early: list[Divergence] = []

    def progress(done: int, of: int, figures: Divergence, seconds: float) -> None:
        if done == min(count, bars.KLD_CHUNKS):
            early.append(figures)

    with load(options, name, n_ctx, cache=cache) as model:
        found = model.divergence(text, ctx_size=n_ctx, chunks=count, progress=progress)
    ratio, size = found.ratio.value, f"{count} x {n_ctx}"
    say(f"{name} {size} {label}: ratio {ratio:.5f}, divergence {found.kld.value:.6f}")
    yield Result(
        "cache-quality", f"perplexity, {size}, {label}", name, "",
        [found.perplexity.value], "pykv, f16", [found.base_perplexity.value],
        found.to_dict(), bars.perplexity(name, chunks, label), ratio_digits=4,
    )  # fmt: skip
    theirs = _their_ratio(reference, name, label) if chunks == REFERENCE_PASS else None
    if theirs is not None:
        yield Result(
            "cache-quality", f"ratio to its own f16, {size}, {label}", name, "", [ratio],
            "llama.cpp", [theirs], bar=Bar("≤", 1.0), ratio_digits=4,
        )  # fmt: skip
    yield _divergence(name, n_ctx, label, early[0], reference)


def _divergence(
    name: str, n_ctx: int, label: str, found: Divergence, reference: dict[str, Any]
) -> Result:
    others, bar = [], None
    if found.n_chunks == bars.KLD_CHUNKS:
        bar = bars.at_most(bars.KLD, name, n_ctx, label, of="median")
        if (name, n_ctx) == ("smollm2", 512):
            known = (v for k, v in reference.items() if k.startswith("mean KL divergence"))
            others = next(known, {}).get(label, [])[:1]
    return Result(
        "cache-quality", f"mean divergence, {found.n_chunks} x {n_ctx}, {label}", name, "nats",
        [found.kld.value], "llama.cpp" if others else "pykv, f16", others, found.to_dict(), bar,
        ratio_digits=3,
    )  # fmt: skip


def _their_ratio(reference: dict[str, Any], name: str, label: str) -> float | None:
    """llama.cpp's perplexity with a type over its own in f16; None: not measured."""
    known = reference.get("perplexity [value, error]", {}).get(REFERENCE_MODELS[name], {})
    entry = known.get(f"{label}/rotated")
    return None if entry is None else float(entry[0] / known[BASE][0])
