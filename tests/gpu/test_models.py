"""A real model on a GPU says what it says on the CPU."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
pytest.importorskip("torch", reason="the GPU's tensors are not installed")

import pykv  # noqa: E402
from pykv.backends import cuda  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.models]

TEXT, COUNT = "The capital of France is", 24


def greedy(path, device):
    sampling = pykv.SamplingConfig(temperature=0, ignore_eos=True)
    with pykv.load(path, load=pykv.LoadConfig(device=device, ctx_size=256)) as model:
        generation = model.generate(TEXT, max_tokens=COUNT, sampling=sampling)
        list(generation)
        return generation.tokens


def test_greedy_tokens(device, smollm2_path, monkeypatch):
    if device == "cpu":
        pytest.skip("takes hours in the interpreter")
    expected = greedy(smollm2_path, "cpu")
    assert greedy(smollm2_path, "cuda") == expected
    monkeypatch.setattr(cuda, "create", partial(cuda.create, graphs=False))
    assert greedy(smollm2_path, "cuda") == expected
