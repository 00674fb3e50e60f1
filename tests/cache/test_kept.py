"""Stores under policies against plain lists of tokens; the oracle is in kept_oracle.py."""

from __future__ import annotations

import numpy as np
import pytest
from kept_oracle import Lists, Run, compare, text_of

from pykv.backends.base import PAGE

# policy, budget, formats, residual
CASES = [
    ("window", "70", ("f16", "f16"), 0),
    ("window", "150", ("q8_0", "f16"), 20),
    ("sinks", "68", ("f16", "f16"), 0),
    ("sinks", "40%", ("q4_0", "q5_1"), 64),
    ("sinks", "130", ("int8", "kivi2", "f32", "random", "none"), 30),
    ("h2o", "64", ("f16", "f16"), 0),
    ("h2o", "45%", ("f16", "kivi4"), 0),
    ("h2o", "90", ("q4_0", "q8_0", None, "auto", "none"), 64),
    ("scissorhands", "80", ("f16", "f16"), 0),
    ("scissorhands", "120", ("fp8_e4m3", "tq4"), 5),
    ("h2o", "100", ("kivi4", "kivi2"), 0),
    ("scissorhands", "100", ("kivi2", "q4_1"), 0),
]
IDS = [f"{policy}-{budget}-{formats[0]}-{formats[1]}" for policy, budget, formats, _ in CASES]
CASE = pytest.mark.parametrize(("policy", "budget", "formats", "residual"), CASES, ids=IDS)
TOKENS = 260


def run_of(policy, budget, formats=("f16", "f16"), residual=0, **more):
    return Run(policy, budget, formats, residual=residual, **more)


@CASE
def test_kept_tokens_budget_and_attention_after_every_token(policy, budget, formats, residual):
    run, text = run_of(policy, budget, formats, residual), text_of(TOKENS)
    sequence = run.store.new_sequence()
    lists = Lists(run, text, sequence)
    for i in range(TOKENS):
        step = run.begin([(sequence, text.part(i, i + 1))])
        outs = run.attend(step)
        holes = run.kept(sequence).cells - run.kept(sequence).live
        assert holes.max() < PAGE
        lists.begin()
        compare(outs, lists.attend(), 0)  # before the policy decides
        run.store.commit()
        lists.decide()
        for layer, head in lists.heads:
            kept = run.store.positions(sequence, layer, head)
            assert kept == lists.positions(layer, head)
            assert len(kept) <= lists.budget()
    assert run.store.positions(sequence, 1, 0) == list(range(TOKENS - 75, TOKENS))
    assert (run.kept(sequence).words[..., 1] > 0).any() == (formats != ("f16", "f16"))
    run.store.free(sequence)
    assert run.in_use() == 0
    assert run.store.nbytes == 0
