"""Caches by name: what a label means, which of them can run, and models that hold them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pykv
from benchmarks.report import Options
from benchmarks.speed import load
from pykv.engine import calibration
from pykv.errors import ConfigError
from pykv.formats.coded import find
from pykv.gguf import open_gguf

BASE = "f16"


def cache_of(label: str, **settings: Any) -> pykv.CacheConfig:
    """The cache of a type, or of "type of keys/type of values"."""
    type_k, _, type_v = label.partition("/")
    return pykv.CacheConfig(type_k, type_v or type_k, **settings)


def with_base(labels: Sequence[str]) -> dict[str, pykv.CacheConfig]:
    """The caches of these types, f16 first and each once."""
    return {label: cache_of(label) for label in (BASE, *labels)}


def say(text: str) -> None:
    """Tell how far things are."""
    print(f"  {text}", file=sys.stderr, flush=True)


def wanting(path: Path, shapes: Sequence[Any], cache: pykv.CacheConfig) -> str | None:
    """Why a cache cannot run for want of a calibration, or None."""
    formats = [find(name) for name in dict.fromkeys((cache.type_k, cache.type_v))]
    levelled = [f for f in formats if f.calibration == "levels"]
    if levelled:
        with open_gguf(path) as file:
            identity = calibration.identity(file, shapes)
        try:
            for format_ in levelled:
                calibration.require(format_.name, identity, path)
        except ConfigError as error:
            return str(error)
    return None


def runnable(
    options: Options, name: str, shapes: Sequence[Any], caches: Mapping[str, pykv.CacheConfig]
) -> dict[str, pykv.CacheConfig]:
    """Those that want nothing; what another wants is said."""
    found = {}
    for label, cache in caches.items():
        reason = wanting(options.models[name], shapes, cache)
        if reason is None:
            found[label] = cache
        else:
            say(f"{name} {label} is left out: {reason}")
    return found


def models_of(
    stack: ExitStack,
    options: Options,
    name: str,
    n_ctx: int,
    caches: Mapping[str, pykv.CacheConfig],
) -> dict[str, pykv.Model]:
    """A model for each cache that can run; the first must want no calibration."""
    first, *others = caches
    models = {first: stack.enter_context(load(options, name, n_ctx, cache=caches[first]))}
    shapes = models[first].store.shapes
    for label, cache in runnable(options, name, shapes, {o: caches[o] for o in others}).items():
        models[label] = stack.enter_context(load(options, name, n_ctx, cache=cache))
    return models
