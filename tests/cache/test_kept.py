"""Stores under policies against plain lists of tokens; the oracle is in kept_oracle.py."""

from __future__ import annotations

import numpy as np
import pytest
from kept_oracle import Lists, Run, compare, text_of
from page_oracle import ROPE

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
    ("window", "90", ("kivi4", "f16", None, "none", "none", None, "read"), 0),
    ("sinks", "40%", ("kivi4", "q8_0", None, "none", "none", None, "read"), 0),
]
IDS = [f"{policy}-{budget}-{formats[0]}-{formats[1]}" for policy, budget, formats, _ in CASES]
CASE = pytest.mark.parametrize(("policy", "budget", "formats", "residual"), CASES, ids=IDS)
TOKENS = 200


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
    # two pages a head beyond the budget's, for each side, and the window's
    assert (run.kept(sequence).tables[..., 1:] > 0).sum(-1).max() <= -(-lists.budget() // PAGE) + 2
    assert run.store.positions(sequence, 1, 0) == list(range(TOKENS - 75, TOKENS))
    assert (run.kept(sequence).words[..., 1] > 0).any() == (formats != ("f16", "f16"))
    run.store.free(sequence)
    assert run.in_use() == 0
    assert run.store.nbytes == 0


# how tokens are batched leaves no trace


@pytest.mark.parametrize(("policy", "budget", "formats", "residual"), CASES[1::6], ids=IDS[1::6])
def test_one_batch_and_sevens_leave_the_same(policy, budget, formats, residual):
    text, seen = text_of(TOKENS), []
    for size in (TOKENS, 7):
        run = run_of(policy, budget, formats, residual)
        sequence = run.store.new_sequence()
        outs = run.read(sequence, text.part(0, TOKENS - 3), size)
        # single rows are decided after the step
        more = run.read(sequence, text.part(TOKENS - 3, TOKENS), 1 if size == 7 else 3)
        outs = [np.concatenate(both) for both in zip(outs, more, strict=True)]
        seen.append((run.state(sequence), outs, run.scores(sequence), run.store.nbytes))
        run.store.free(sequence)
    for state, outs, scores, nbytes in seen[1:]:
        assert state == seen[0][0]
        assert nbytes == seen[0][3]
        np.testing.assert_allclose(scores, seen[0][2], rtol=1e-6, atol=1e-6)
        for a, b in zip(outs, seen[0][1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["sinks", "h2o"])
def test_sequences_in_one_batch_leave_what_each_alone_leaves(policy):
    together, alone = (run_of(policy, "70", ("q8_0", "f16")) for _ in range(2))
    texts = [text_of(n, seed=n) for n in (150, 1, 90)]
    sequences = [together.store.new_sequence() for _ in texts]
    parts = list(zip(sequences, texts, strict=True))
    outs = together.write(parts)
    row = 0
    for sequence, text in parts:
        own = alone.store.new_sequence()
        for a, b in zip(alone.write([(own, text)]), outs, strict=True):
            np.testing.assert_allclose(a, b[row : row + len(text)], rtol=1e-5, atol=1e-6)
        assert alone.state(own) == together.state(sequence)
        row += len(text)


# positions by place


@pytest.mark.parametrize(
    ("policy", "budget", "formats", "residual"),
    [
        ("sinks", "70", ("f32", "f32"), 0),
        ("sinks", "30%", ("f32", "q8_0"), 0),
        ("sinks", "100", ("f16", "f16", None, "none", "none", None, "read"), 0),
        ("window", "40%", ("f16", "f16", None, "none", "none", None, "read"), 0),
    ],
)
@pytest.mark.parametrize("size", [50])
def test_sinks_are_met_at_their_place_and_the_window_at_its_distance(
    policy, budget, formats, residual, size
):
    run, n = run_of(policy, budget, formats, residual, rope=ROPE), 180
    text, sequence = text_of(n), run.store.new_sequence()
    lists, row = Lists(run, text, sequence), 0
    for first in range(0, n, size):
        part = text.part(first, first + size)
        step = run.begin([(sequence, part)])
        outs = run.attend(step)
        for row in range(len(part)):
            lists.begin()
            compare(outs, lists.attend(), row)
            lists.decide()
        run.store.commit()
