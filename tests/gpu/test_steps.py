"""Decoding steps on a GPU: captured ones give the launches' bits, and the reference's logits."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from verbs import Run  # noqa: E402

from pykv.backends import cuda, reference  # noqa: E402
from pykv.config import CacheConfig  # noqa: E402

pytestmark = pytest.mark.gpu

TOKENS = np.random.default_rng(1).integers(0, 61, 220).astype(np.int32)
N_PROMPT = 68 - 3  # the page after the sinks is full three tokens later


def logits(device, graphs, config):
    """Of a prompt, and of two sequences that take turns, by one token and by three."""
    run = Run(cuda.create(device=device, graphs=graphs), config)
    out = [run.read(TOKENS[:N_PROMPT])]
    second = run.store.fork(run.sequence)
    for i in range(N_PROMPT, N_PROMPT + 20, 4):
        for n, at in ((1, i), (3, i + 1)):
            out += [run.step([(s, TOKENS[at : at + n])]) for s in (run.sequence, second)]
    captured = len(run.backend._steps._captured)
    run.backend.close()
    return np.concatenate(out), captured


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig("f16", "q8_0", residual=0),
        CacheConfig("q8_0", "kivi2", residual=0),
        CacheConfig("q4_0", "q4_0", residual=0),
    ],
    ids=lambda c: f"{c.type_k}-{c.type_v}",
)
def test_graphs_give_the_launches_bits(device, config):
    expected, none = logits(device, False, config)
    found, captured = logits(device, True, config)
    assert none == 0
    assert captured == (2 if device == "cuda" else 0)
    np.testing.assert_array_equal(found, expected)


def test_a_model_reads_and_decodes_like_the_reference(device):
    config = CacheConfig("f32", "f32", sinks=4)
    expected = Run(reference.create(), config).read(TOKENS[:90])
    # all products in float32
    run = Run(cuda.create(device=device, deterministic=True), config)
    found = np.concatenate([run.read(TOKENS[:80]), run.read(TOKENS[80:90], 3)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
