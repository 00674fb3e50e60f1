"""Measuring what calibration files hold: a text goes through the model, and each layer is watched.

Scales (fp8): the largest magnitude of a KV head's keys, turned by RoPE, or values, over the largest
that the type holds. Levels and ranges (nuq): a key channel's range, before RoPE, is its least and
largest value, or with `outliers=P%` its P / 2 and 100 - P / 2 percentiles; a value's range is its
token's, as the format chooses it. Levels are a weighted k-means (levels.py) of where values lie in
their ranges, over a layer's keys or values of all heads. A value's weight is the squared derivative
of the attention output (importance.py), times its range's half width squared, since that is what an
error in the range is multiplied by. Low-rank bases: right singular vectors of each head's keys,
turned by RoPE, and values.

The first 4 tokens of a chunk count for scales only: the cache keeps them exact. Levels, percentiles
and weights are those of some pages of 64 tokens of each chunk, drawn once for all layers with a
fixed seed: as many as let the keys and weights that are held take 384 MiB, and 1,024 tokens at
least. Least and largest values, scales and bases are of all tokens. A page's outliers, as the
format chooses them, have no weight; what lies beyond a range and is none counts as its end.

Where KVQuant differs: its weights are squared gradients of the model's loss, from a backward pass,
which sees what later layers do with an error, and are not multiplied by the range's width; its
k-means starts at random and sees every token, but no value beyond a range; every key beyond the
percentiles is an outlier of it, while a page has entries for a fixed number; so are the values of a
token beyond its own percentiles.
Source: Hooper et al. 2024, KVQuant, arXiv:2401.18079, section 3.3; github.com/SqueezeAILab/KVQuant,
quant/llama_simquant.py, and quant/kvquant/simquant_module_quantizer.py.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from pykv import registry
from pykv.backends.base import I32
from pykv.backends.cpu import CpuBackend
from pykv.engine import keeping
from pykv.engine.calibration import LOWRANK, Calibration
from pykv.engine.chunks import first_chunks, read_chunk
from pykv.engine.watch import FIRST, Watch
from pykv.errors import ConfigError
from pykv.formats.base import PAGE_TOKENS
from pykv.formats.coded import CodedFormat, find

if TYPE_CHECKING:
    from pykv.engine.model import Model

log = logging.getLogger("pykv")

Progress = Callable[[int, int, float], None]  # chunks done, of, seconds a chunk
LEAST_CHUNK = FIRST + PAGE_TOKENS  # tokens
FEW_TOKENS, FEW_DISTINCT = 2048, 100  # fewer are warned of
OUTLIERS = "outliers=1%"  # the option that `all` includes


def types_known() -> list[str]:
    """Every name that needs or takes a calibration, the options of `all` included."""
    known = []
    for name in registry.names("formats"):
        format_ = find(name)
        if isinstance(format_, CodedFormat) and format_.calibration != "none":
            known.append(name)
            if format_.calibration == "levels":
                known.append(f"{name}:{OUTLIERS}")
    return [*known, LOWRANK]


def choose(text: str) -> list[str]:
    """Types from their names with commas between them, or `all`; each once, in the order given.

    Raises ConfigError: an unknown one, or one that needs no calibration.
    """
    known = types_known()
    if text.strip() == "all":
        return known
    chosen = dict.fromkeys(_checked(part.strip(), known) for part in text.split(","))
    return list(chosen)


def _checked(name: str, known: Sequence[str]) -> str:
    """The type as its file is named."""
    if name == LOWRANK:
        return name
    stem = name.partition(":")[0]
    if stem == LOWRANK:
        raise ConfigError(f"'{name}': one calibration serves every rank; write {LOWRANK} alone")
    if stem in known:
        return find(name).name
    if stem in registry.names("formats"):
        raise ConfigError(
            f"cache type {stem} needs no calibration; those that do are {', '.join(known)}"
        )
    close = difflib.get_close_matches(stem, known, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"unknown type '{name}' to calibrate: it is one of {', '.join(known)}; "
        f"all, alone, means each of them{hint}"
    )


def calibrate(
    model: Model,
    text: str | bytes,
    types: Sequence[str],
    ctx_size: int = 2048,
    chunks: int | None = 16,
    progress: Progress | None = None,
) -> list[Calibration]:
    """Measure the numbers of types, as `choose` gives them, on a text; chunks None: all of it.

    A model whose `ubatch` is the chunk needs the least memory: each layer is dealt with at once.
    Raises ConfigError: the text is shorter than a chunk, a chunk does not fit, or the model does
    not run on the CPU backend; NumericsError.
    """
    dev = model.dev
    if not isinstance(dev, CpuBackend):
        raise ConfigError(f"calibration runs on the cpu backend, not on {dev.name}: --device cpu")
    keeping.refuse(model.config, "calibrate")
    tokens = _whole_chunks(model, text, ctx_size, chunks)
    if tokens.size < FEW_TOKENS:
        log.warning(
            "%d tokens are few to calibrate on; ranges hold better from %d on",
            tokens.size, FEW_TOKENS,
        )  # fmt: skip
    distinct = len(np.unique(tokens))
    if distinct < FEW_DISTINCT:
        log.warning(
            "the text has %d different tokens: ranges that are measured on it will fit no other",
            distinct,
        )
    formats = [f for t in types if t != LOWRANK and isinstance(f := find(t), CodedFormat)]
    shapes, started = model.store.shapes, time.perf_counter()
    with ThreadPoolExecutor(dev.threads) as pool:
        levelled = [f for f in formats if f.calibration == "levels"]
        watch = Watch(shapes, levelled, len(tokens), ctx_size, pool)
        dev.listener, before = watch, dev.listener
        try:
            for i, chunk in enumerate(tokens):
                watch.begin(i)
                read_chunk(model, chunk)
                if progress is not None:
                    progress(i + 1, len(tokens), (time.perf_counter() - started) / (i + 1))
        finally:
            dev.listener = before
        layers = range(len(shapes))
        arrays = zip(*pool.map(lambda i: watch.numbers(i, formats), layers), strict=True)
        made = {
            f.name: Calibration(f.name, tokens.size, tuple(of_layers))
            for f, of_layers in zip(formats, arrays, strict=True)
        }
        if LOWRANK in types:
            made[LOWRANK] = Calibration(LOWRANK, tokens.size, tuple(pool.map(watch.bases, layers)))
    return [made[t] for t in types]


def _whole_chunks(model: Model, text: str | bytes, ctx_size: int, chunks: int | None) -> I32:
    if ctx_size < LEAST_CHUNK:
        raise ConfigError(
            f"a chunk needs at least {LEAST_CHUNK} tokens to calibrate on, not {ctx_size}"
        )
    return first_chunks(model, text, ctx_size, chunks)
