"""The GPU backend in Triton's interpreter, on CPU tensors: small models beside the reference."""

from __future__ import annotations

import numpy as np
import pytest
from verbs import Run

from pykv.backends import reference
from pykv.config import CacheConfig

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from pykv.backends import cuda  # noqa: E402

TOKENS = np.random.default_rng(1).integers(0, 61, 200).astype(np.int32)


def run(config, **settings):
    return Run(cuda.create(device="cpu", **settings), config)


def test_exact_caches_give_the_references_logits():
    config = CacheConfig("f32", "f32", sinks=4)
    expected = Run(reference.create(), config).read(TOKENS[:90])
    got = run(config)
    logits = np.concatenate([got.read(TOKENS[:80]), got.read(TOKENS[80:90], 3)])
    assert np.abs(logits - expected).max() < 1e-3
