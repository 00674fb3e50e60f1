"""How tokens are batched changes no logits that --deterministic gives, and hardly any other.

Parts (c) and (d) of the cache's invariant; (a) and (b) are in the tests of cache and backends.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from page_oracle import numbers_for

import pykv
from pykv.cache.layout import cache_types
from pykv.cache.store import Store
from pykv.config import CacheConfig, LoadConfig
from pykv.formats.coded import find

pytestmark = pytest.mark.models
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
FEW = ["q4_0", "kivi2"]


@pytest.fixture(scope="module")
def first_layers(smollm2_path):
    """The first four layers of the model; deterministic."""
    with pykv.load(smollm2_path, load=LoadConfig(deterministic=True, threads=2)) as model:
        h = model._graph.h
        model._graph.h = replace(h, n_layer=4, n_head=h.n_head[:4], n_kv=h.n_kv[:4])
        yield model


class Reader:
    """Reads a text into a cache of its own, so many tokens at a time."""

    def __init__(self, model, config, tokens):
        self.model, self.tokens = model, np.array(tokens, np.int32)
        shapes = model._graph.shapes
        numbers = ()
        if "levels" in (
            getattr(find(t), "calibration", "") for t in (config.type_k, config.type_v)
        ):
            numbers = [
                [numbers_for(name, side, s.d_k, "none", s.n_kv)
                 for side, name in enumerate((config.type_k, config.type_v))]
                for s in shapes
            ]  # fmt: skip
        self.store = Store(shapes, config, len(tokens), numbers=numbers)
        model.dev.prepare(shapes, self.store.formats)

    def read(self, sequence, start, size, every):
        """Logits of every so-manieth of the tokens from `start` on, and of the last."""
        rows = []
        for i in range(start, len(self.tokens), size):
            part = self.tokens[i : i + size]
            here = np.arange(i, i + len(part))
            wanted = (here % every == 0) | (here == len(self.tokens) - 1)
            outputs = np.flatnonzero(wanted).astype(np.int32)
            # a batch of which nothing is wanted gives its last row
            outputs = outputs if len(outputs) else np.array([len(part) - 1], np.int32)
            logits = self.model.step([(sequence, part)], outputs, store=self.store)
            rows += list(logits) if wanted.any() else []
        return np.stack(rows)

    def split(self, size, every):
        sequence = self.store.new_sequence()
        logits = self.read(sequence, 0, size, every)
        self.store.free(sequence)
        return logits


@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in cache_types()]
    + [pytest.param("nuq3:outliers=1%", marks=pytest.mark.slow)],
)
def test_deterministic_logits_are_the_same_bits_for_every_split(first_layers, name):
    """Long enough that two pages are encoded, whatever the residual."""
    residual = find(name).residual
    n = 4 + residual + 2 * 64 + 9
    tokens = first_layers.tokenizer.encode(TEXT)[:n]
    reader = Reader(first_layers, CacheConfig(name, name), tokens)
    whole = reader.split(n, 9)
    for size in (1, 7, 64, 100):
        np.testing.assert_array_equal(reader.split(size, 9), whole)
    # a prefix that is there already, against an empty cache
    prefix = Reader(first_layers, CacheConfig(name, name), tokens)
    sequence, kept = prefix.store.new_sequence(), 99
    first_layers.step([(sequence, prefix.tokens[:kept])], np.zeros(1, np.int32), store=prefix.store)
    fork = prefix.store.fork(sequence)
    np.testing.assert_array_equal(prefix.read(fork, kept, n, 9), whole[kept // 9 :])


SETTINGS = {  # keys and values, and the design's bound of the mean KL divergence
    "f16": ("f16", "f16", 1e-5),
    "q8_0": ("q8_0", "q8_0", 1e-4),
    "fp8_e4m3": ("fp8_e4m3", "int8", 1e-4),
    "q4_0": ("q4_0", "q4_0", 2e-3),
    "tq4": ("tq4", "kivi4", 2e-3),
    "kivi2": ("kivi2", "kivi2", 2e-3),
}


def mean_divergence(p, q):
    """Mean over the rows of KL(p || q), in float64."""
    p, q = (x - x.max(-1, keepdims=True) for x in (p.astype(np.float64), q.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1).mean()


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("path", ["smollm2_path", "gemma_path"])
def test_splits_hardly_move_the_logits(path, setting, request):
    """Each sixth of 400 tokens; most of them see encoded pages."""
    name_k, name_v, bound = SETTINGS[setting]
    with pykv.load(request.getfixturevalue(path), load=LoadConfig(threads=2)) as model:
        tokens = model.tokenizer.encode(TEXT)[:400]
        reader = Reader(model, CacheConfig(name_k, name_v), tokens)
        whole = reader.split(400, 6)
        for size in (1, 7, 100):
            assert mean_divergence(whole, reader.split(size, 6)) <= bound
