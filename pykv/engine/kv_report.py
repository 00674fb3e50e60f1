"""What each cache type does to a model's attention, by layer and KV head, on a text.

The text goes through the model once, on the cache that it was loaded with, and each layer's
queries, keys and values are noted. For the queries of a chunk's last quarter the attention output o
is computed in float32, and again with what a type would keep of the keys, of the values, and of
both. A head's error is ||o - o'||_F / ||o||_F over these queries, all query heads of its group and
all chunks. Every layer gets the same inputs for every type, so no error grows from layer to layer.

What a query sees is what the cache shows it: sinks and newest tokens as the tail's type has them,
the others decoded from pages that were encoded with the type's transform, of a window its tokens.

A channel's magnitude is the largest of its keys', sinks apart, as the cache stores them: turned by
RoPE, unless keys are turned when they are read. A channel is an outlier where its magnitude is more
than `outlier_ratio` times the median of its head's channels; KIVI's finding is that a model's keys
have few such channels, and always the same ones. Spectra (spectrum.py) are of the same keys, and
of the values, sinks apart too: what a low-rank map of pages has to keep.
Source: Liu et al. 2024, KIVI, arXiv:2402.02750, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv.backends.base import F32, PAGE, LayerShape
from pykv.backends.cpu import CpuBackend
from pykv.cache import layout
from pykv.cache.layout import LayerLayout
from pykv.config import CacheConfig
from pykv.engine import keeping, numbers
from pykv.engine.chunks import first_chunks, read_chunk
from pykv.engine.kv_errors import PARTS, Candidate, Part, Progress, Watch
from pykv.engine.spectrum import F64, KEPT, Spectrum
from pykv.errors import ConfigError
from pykv.gguf import open_gguf

if TYPE_CHECKING:
    from pykv.engine.model import Model

OUTLIER_RATIO = 5.0


@dataclass(frozen=True)
class Spread:
    """Errors of all KV heads: the middle, what 95 % stay below, and the worst head."""

    median: float
    p95: float
    worst: float
    layer: int
    head: int


@dataclass(frozen=True, eq=False)
class TypeErrors:
    """What a type does; `errors[part][layer]` is f64 [G]."""

    name: str
    bits_k: float
    bits_v: float
    layouts: Sequence[LayerLayout]
    errors: dict[Part, list[F64]]

    def spread(self, part: Part) -> Spread:
        """The errors with this part encoded, over all layers and heads."""
        of = self.errors[part]
        flat = np.concatenate(of)
        places = [(layer, head) for layer, errors in enumerate(of) for head in range(len(errors))]
        median, p95 = np.percentile(flat, (50, 95))
        at = int(flat.argmax())
        return Spread(float(median), float(p95), float(flat[at]), *places[at])


@dataclass(frozen=True, eq=False)
class Report:
    """A model's keys and values, and what each type does to its attention."""

    model: Path
    ctx_size: int  # tokens of a chunk
    n_chunks: int
    n_queries: int  # of a chunk, the last ones
    sinks: int
    outlier_ratio: float
    shapes: Sequence[LayerShape]
    magnitudes: list[F32]  # of each layer's key channels, [G, D]
    spectra: Sequence[tuple[Spectrum, Spectrum]]  # of each layer's keys and values
    types: list[TypeErrors]
    left_out: dict[str, str] = field(default_factory=dict)  # types that do not run, and why

    def ratios(self, layer: int) -> F32:
        """Magnitudes of a layer's key channels over the median of their head's, [G, D]."""
        of = self.magnitudes[layer]
        middle = np.median(of, axis=1, keepdims=True)
        none = np.where(of > 0, np.float32(np.inf), np.float32(1))
        return np.divide(of, middle, out=none, where=middle > 0).astype(np.float32)

    def outliers(self, layer: int, head: int) -> list[tuple[int, float]]:
        """A head's outlier channels and their ratios, the largest first."""
        ratios = self.ratios(layer)[head]
        ordered = np.argsort(-ratios, kind="stable")
        return [
            (int(c), float(ratios[c])) for c in ordered if float(ratios[c]) > self.outlier_ratio
        ]

    def worst(self, n: int) -> list[tuple[int, int]]:
        """At most n heads, layer and head, those first that are farthest above a type's median."""
        places = [(i, g) for i, shape in enumerate(self.shapes) for g in range(shape.n_kv)]
        most = np.zeros(len(places))
        for t in self.types:
            errors, middle = np.concatenate(t.errors["both"]), t.spread("both").median
            np.maximum(most, errors / middle if middle > 0 else errors > 0, out=most)
        return [places[i] for i in np.argsort(-most, kind="stable")[:n]]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; errors are shares of 1, an infinite ratio is null."""
        return {
            "model": str(self.model),
            "ctx_size": self.ctx_size,
            "chunks": self.n_chunks,
            "queries": self.n_queries,
            "sinks": self.sinks,
            "outlier_ratio": self.outlier_ratio,
            "rank_keeps": KEPT,
            "types": [_type_dict(t) for t in self.types],
            "left_out": self.left_out,
            "layers": [self._layer_dict(i) for i in range(len(self.shapes))],
        }

    def _layer_dict(self, layer: int) -> dict[str, Any]:
        keys, values = self.spectra[layer]
        key_ranks, value_ranks = keys.ranks(), values.ranks()
        heads = [
            {
                "head": head,
                "outliers": [
                    {"channel": c, "ratio": r if np.isfinite(r) else None}
                    for c, r in self.outliers(layer, head)
                ],
                "key_magnitudes": [float(m) for m in self.magnitudes[layer][head]],
                "key_rank": key_ranks[head],
                "key_singular": keys.singular[head].tolist(),
                "value_rank": value_ranks[head],
                "value_singular": values.singular[head].tolist(),
                "errors": {
                    t.name: {part: float(t.errors[part][layer][head]) for part in PARTS}
                    for t in self.types
                },
            }
            for head in range(self.shapes[layer].n_kv)
        ]
        return {"layer": layer, "window": self.shapes[layer].window, "heads": heads}


def _type_dict(of: TypeErrors) -> dict[str, Any]:
    spreads = {part: of.spread(part) for part in PARTS}
    return {
        "type": of.name,
        "bits_k": of.bits_k,
        "bits_v": of.bits_v,
        "residual": of.layouts[0].residual,
        "transform_k": of.layouts[0].formats.transform_k,
        "transform_v": of.layouts[0].formats.transform_v,
        "position": of.layouts[0].formats.position,
        **{
            part: {
                "median": s.median,
                "p95": s.p95,
                "worst": {"error": s.worst, "layer": s.layer, "head": s.head},
            }
            for part, s in spreads.items()
        },
    }


def check_types(types: Sequence[str], cache: CacheConfig) -> None:
    """Raise ConfigError for types that are wrong whatever the model."""
    keeping.refuse(cache, "kv-report")
    for name in types:
        layout.check(_alone(name, cache))


def _alone(name: str, cache: CacheConfig) -> CacheConfig:
    """That cache with the type for keys and values of all layers."""
    return replace(cache, type_k=name, type_v=name, override=None)


def candidates(
    model: Model, types: Sequence[str] | None, cache: CacheConfig
) -> tuple[list[Candidate], dict[str, str]]:
    """The types as that cache would have them for keys and for values, each once.

    None: all that run, those with most bits first, and why the others do not.
    No override counts, and so no guard: each type is in every layer as it is.
    Raises ConfigError: a type that was asked for does not run, as without a calibration that it
    needs, or none does.
    """
    shapes = model.store.shapes

    def one(name: str) -> Candidate:
        layouts = layout.layouts_of(_alone(name, cache), shapes)
        formats = [each.formats for each in layouts]
        with open_gguf(model.path) as file:
            return Candidate(name, layouts, numbers.of_cache(file, model.path, shapes, formats))

    if types is not None and not types:
        raise ConfigError("no cache types were named: name one at least, or leave them to pykv")
    if types is not None:
        return [one(name) for name in dict.fromkeys(types)], {}
    found, left_out = [], {}
    for name in layout.cache_types():
        try:
            found.append(one(name))
        except ConfigError as error:
            left_out[name] = str(error)
    if not found:
        raise ConfigError("; ".join(left_out.values()))
    found.sort(key=lambda c: (-c.bits(shapes, "key") - c.bits(shapes, "value"), c.name))
    return found, left_out


def measure(
    model: Model,
    text: str | bytes,
    types: Sequence[str] | None = None,
    cache: CacheConfig | None = None,
    ctx_size: int = 2048,
    chunks: int | None = 1,
    outlier_ratio: float = OUTLIER_RATIO,
    progress: Progress | None = None,
) -> Report:
    """Watch the model on a text's first chunks; None: all of it.

    `cache` has the settings of the types on trial, its own types apart; None: the model's. A model
    whose `ubatch` is the chunk needs the least memory: each layer is dealt with at once.
    Raises ConfigError: as `candidates`, the text or a chunk is too short, a chunk does not fit, or
    the model does not run on the CPU backend; NumericsError.
    """
    dev = model.dev
    if not isinstance(dev, CpuBackend):
        raise ConfigError(f"the report watches the cpu backend, not {dev.name}: --device cpu")
    if any(shape.shared for shape in model.store.shapes):
        raise ConfigError(
            "the report measures keys and values apart, and this model's values are a part of its "
            "keys; pykv perplexity --kl-divergence compares its cache types"
        )
    cache = model.config if cache is None else cache
    keeping.refuse(cache, "kv-report")
    tried, left_out = candidates(model, types, cache)
    _check_chunk(tried, cache.sinks, ctx_size)
    tokens, shapes = first_chunks(model, text, ctx_size, chunks), model.store.shapes
    with ThreadPoolExecutor(dev.threads) as pool:
        watch = Watch(
            shapes, tried, cache.sinks, ctx_size, len(tokens), cache.position == "read", pool,
            progress,
        )  # fmt: skip
        dev.listener, before = watch, dev.listener
        try:
            for chunk in tokens:
                read_chunk(model, chunk)
        finally:
            dev.listener = before
    of_types = [
        TypeErrors(
            c.name, c.bits(shapes, "key"), c.bits(shapes, "value"), c.layouts,
            {part: watch.errors(i, p) for p, part in enumerate(PARTS)},
        )
        for i, c in enumerate(tried)
    ]  # fmt: skip
    return Report(
        model.path, ctx_size, len(tokens), ctx_size // 4, cache.sinks, outlier_ratio, shapes,
        watch.magnitudes, watch.spectra(), of_types, left_out,
    )  # fmt: skip


def _check_chunk(tried: Sequence[Candidate], sinks: int, ctx_size: int) -> None:
    """Raise ConfigError where the first query would see no page."""
    residual, name = max((c.layouts[0].residual, c.name) for c in tried)
    before = sinks + residual + PAGE  # tokens that precede the first query at least
    if ctx_size - ctx_size // 4 < before:
        least = (before - 1) * 4 // 3 + 1
        raise ConfigError(
            f"cache type {name} keeps {sinks} first and {residual} newest tokens exact, so a chunk "
            f"needs {least} tokens to show what the others become, not {ctx_size}: raise --ctx-size"
        )
