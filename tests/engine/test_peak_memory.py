"""Encoded caches have no second, wider copy: memory is measured while prompts are read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import pykv
from pykv.config import CacheConfig, LoadConfig

UBATCH = 256
SLABS = 4 << 20  # bytes by which four pools of 1 MiB slabs may differ


def read(path, types, n):
    """Peak bytes while n tokens are read, bytes held after it, and the store's own figure."""
    tokens = np.random.default_rng(0).integers(100, 40_000, n).astype(np.int32)
    with pykv.load(
        path, cache=CacheConfig(*types), load=LoadConfig(ctx_size=1600, threads=2, ubatch=UBATCH)
    ) as model:
        warm = model.store.new_sequence()
        model.step([(warm, tokens[:UBATCH])], np.array([0], np.int32))
        model.store.free(warm)
        tracemalloc.start()
        try:
            sequence = model.store.new_sequence()
            for first in range(0, n, UBATCH):
                batch = tokens[first : first + UBATCH]
                model.step([(sequence, batch)], np.array([0], np.int32))
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return peak, held, model.store.nbytes


@pytest.mark.parametrize("types", [("q4_0", "q4_0"), ("kivi2", "kivi2")])
def test_a_longer_prompt_takes_the_bytes_of_its_codes_and_no_more(smollm2_path, types):
    short, long = read(smollm2_path, types, 512), read(smollm2_path, types, 1536)
    codes = long[2] - short[2]
    as_f16 = 1024 * 30 * 3 * (64 + 64) * 2
    assert codes < 0.45 * as_f16
    assert long[0] - short[0] < codes + SLABS < as_f16


def test_reading_needs_no_more_beside_the_cache_than_f16_does(smollm2_path):
    exact = read(smollm2_path, ("f16", "f16"), 1024)
    coded = read(smollm2_path, ("kivi2", "kivi2"), 1024)
    assert coded[0] - coded[1] < exact[0] - exact[1] + SLABS
