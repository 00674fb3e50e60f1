"""Text that runs on past the context, under policies that keep a window."""

from __future__ import annotations

import numpy as np
import pytest

import pykv
from pykv.backends.base import PAGE
from pykv.config import CacheConfig, LoadConfig

pytestmark = pytest.mark.models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f16", "q4_0"])
def test_a_hundred_thousand_tokens_take_constant_memory(smollm2_path, name):
    """The most bytes over a page of steps, early and late, and predictions that stay right."""
    cache = CacheConfig(name, name, policy="sinks", budget="512")
    with pykv.load(smollm2_path, cache=cache, load=LoadConfig(ctx_size=1024)) as model:
        text = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40
        ids = np.array(model.ids(text, start=False), np.int32)
        sequence, n = model.store.new_sequence(), 0

        def read(tokens):
            nonlocal n
            part = np.take(ids, np.arange(n, n + tokens), mode="wrap")
            model.step([(sequence, part)], np.empty(0, np.int32))
            n += tokens

        def most():
            seen = []
            for _ in range(PAGE):
                read(1)
                seen.append(model.store.nbytes)
            return max(seen)

        while n < 2000:
            read(400)
        early = most()
        while n < 100_000:
            read(500)
        assert most() == early
        assert model.store.length(sequence) == n > 100_000
        # the text is one sentence again and again: what follows is hardly in doubt
        part = np.take(ids, np.arange(n, n + 101), mode="wrap")
        logits = model.step([(sequence, part[:100])], np.arange(100, dtype=np.int32))
        assert (logits.argmax(-1) == part[1:]).mean() > 0.9
