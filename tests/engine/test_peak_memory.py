"""Encoded caches have no second, wider copy: memory is measured while prompts are read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import pykv
from pykv.config import CacheConfig, LoadConfig

UBATCH = 256
SLABS = 4 << 20  # bytes by which four pools of 1 MiB slabs may differ


def read(path, types, lengths):
    """After each length, ascending: peak bytes of reading so far, bytes held, store.nbytes."""
    tokens = np.random.default_rng(0).integers(100, 40_000, max(lengths)).astype(np.int32)
    config, found = LoadConfig(ctx_size=1600, threads=2, ubatch=UBATCH), []
    with pykv.load(path, cache=CacheConfig(*types), load=config) as model:
        tracemalloc.start()
        try:
            sequence = model.store.new_sequence()
            for first in range(0, max(lengths), UBATCH):
                batch = tokens[first : first + UBATCH]
                model.step([(sequence, batch)], np.array([0], np.int32))
                if first + UBATCH in lengths:
                    held, peak = tracemalloc.get_traced_memory()
                    found.append((peak, held, model.store.nbytes))
        finally:
            tracemalloc.stop()
    return found


@pytest.mark.parametrize("types", [("q4_0", "q4_0"), ("kivi2", "kivi2")])
def test_a_longer_prompt_takes_the_bytes_of_its_codes_and_no_more(smollm2_path, types):
    short, long = read(smollm2_path, types, (512, 1024))
    codes = long[2] - short[2]
    as_f16 = 512 * 30 * 3 * (64 + 64) * 2
    assert codes < 0.45 * as_f16
    assert long[0] - short[0] < codes + SLABS < as_f16


@pytest.mark.slow
def test_reading_needs_no_more_beside_the_cache_than_f16_does(smollm2_path):
    exact = read(smollm2_path, ("f16", "f16"), (1024,))[0]
    coded = read(smollm2_path, ("kivi2", "kivi2"), (1024,))[0]
    assert coded[0] - coded[1] < exact[0] - exact[1] + SLABS
