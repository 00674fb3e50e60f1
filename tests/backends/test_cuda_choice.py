"""Tokens that are drawn where the logits lie are the sampler's own."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from pykv.backends.cuda_choice import choose  # noqa: E402
from pykv.config import SamplingConfig  # noqa: E402
from pykv.engine.sampler import Sampler  # noqa: E402

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "temperature": 1.0}
SETTINGS = [
    {"temperature": 0},
    {"temperature": 0, "repeat_penalty": 1.8, "presence_penalty": 0.5},
    {},
    {"top_k": 1},
    {"top_k": 5, "temperature": 3.0},
    OFF,
    {**OFF, "top_p": 0.6},
    {**OFF, "min_p": 0.2},
    {**OFF, "typical_p": 0.7},
    {**OFF, "typical_p": 0.5, "top_p": 0.9, "min_p": 0.01, "top_k": 30},
    {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "repeat_last_n": -1},
    {"top_k": 10**6, "top_p": 1.0, "min_p": 0.1},
]


@pytest.mark.parametrize("n_vocab", [40, 5000])
@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_are_the_samplers(settings, n_vocab):
    rng = np.random.default_rng(n_vocab)
    suppress = [3, 7]
    ours, theirs = (
        Sampler(SamplingConfig(seed=11, **settings), {}, n_vocab, suppress) for _ in range(2)
    )
    for i in range(25):
        x = (rng.standard_normal(n_vocab) * 3).astype(np.float32)
        if i % 3 == 0:
            x = np.round(x)  # many equal ones
        x[3] = 99  # suppressed
        chosen = choose(torch.from_numpy(x), ours.choice())
        ours.drawn(chosen.n_candidates)
        assert (chosen.token, chosen.finite) == (theirs.sample(x), True)
        for sampler in (ours, theirs):
            sampler.accept([chosen.token])


def test_signs_of_zero_make_no_difference():
    x = np.array([-0.0, 0.0, -0.0, -1.0], np.float32)
    sampler = Sampler(SamplingConfig(seed=1, top_k=1), {}, 4)
    assert choose(torch.from_numpy(x), sampler.choice()).token == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told(bad, temperature):
    x = np.zeros(50, np.float32)
    x[20] = bad
    sampler = Sampler(SamplingConfig(seed=1, temperature=temperature), {}, 50)
    assert not choose(torch.from_numpy(x), sampler.choice()).finite
