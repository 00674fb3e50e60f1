"""The CPU under every policy against the reference backend, through stores that see the same."""

from __future__ import annotations

import numpy as np
import pytest
from kept_oracle import Run, Text, text_of
from page_oracle import ROPE

from pykv.backends.base import LayerShape

EXACT, CODED = ("f16", "f16"), ("q8_0", "q8_0", None, "none", "none")
READ = ("kivi4", "f16", None, "none", "none", None, "read")
# policy, budget, formats, residual, query heads per KV head, channels of keys and values, RoPE
CASES = [
    ("window", "70", CODED, 0, 1, 32, 32, None),
    ("sinks", "66", EXACT, 0, 7, 40, 33, None),
    ("sinks", "40%", ("f32", "f32"), 0, 4, 32, 40, ROPE),
    ("sinks", "90", READ, 0, 2, 40, 32, ROPE),
    ("h2o", "64", EXACT, 0, 9, 33, 40, None),
    ("h2o", "90", CODED, 64, 4, 32, 32, None),
    ("scissorhands", "90", ("kivi4", "f16"), 0, 2, 40, 32, None),
    ("scissorhands", "80", CODED, 5, 7, 32, 32, None),
]
PROMPTS = [
    ("snapkv:window=20", "70", CODED, 3, 4, 32, 32, None),
    ("fastgen:window=9,recovery=0.7", None, EXACT, 0, 9, 33, 40, None),
    ("h2o:prompt=full", "70", ("kivi4", "f16"), 0, 2, 40, 32, None),
]


def runs_of(make_cpu, policy, budget, formats, residual, group, d_k, d_v, rope):
    """A run of each backend."""
    shapes = (LayerShape(2 * group, 2, d_k, d_v), LayerShape(group, 1, d_k, d_v, window=75))
    return shapes, [
        Run(policy, budget, formats, residual=residual, shapes=shapes, rope=rope, backend=backend)
        for backend in (make_cpu(), None)
    ]


def same(outs):
    """The design's bound between two ways to the same output."""
    for a, b in zip(*outs, strict=True):
        error = np.linalg.norm(a - b, axis=-1)
        assert (error <= 1e-5 * np.linalg.norm(b, axis=-1)).all()


def same_states(runs, sequence, rope=None):
    a, b = (run.state(sequence) for run in runs)
    for head, (positions, alive, words, cells) in a.items():
        assert (positions, alive, words) == b[head][:3]
        # a turn's rounding may show in a key
        assert rope is not None or cells == b[head][3]
    np.testing.assert_allclose(*(run.scores(sequence) for run in runs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "budget", "formats", "residual", "group", "d_k", "d_v", "rope"), CASES
)
def test_policies_of_every_token(
    make_cpu, policy, budget, formats, residual, group, d_k, d_v, rope
):
    shapes, runs = runs_of(make_cpu, policy, budget, formats, residual, group, d_k, d_v, rope)
    text, other = text_of(215, shapes), text_of(90, shapes, seed=1)
    a, b = ([run.store.new_sequence() for run in runs][0] for _ in range(2))
    parts = [[(a, 0, 100)], [(a, 100, 101)], [(a, 101, 140), (b, 0, 70)]]
    parts += [[(a, 140 + i, 141 + i), (b, 70 + i, 71 + i)] for i in range(20)]
    parts.append([(a, 160, 215)])
    for batch in parts:
        rows = [(s, (text if s == a else other).part(*span)) for s, *span in batch]
        same([run.write(rows) for run in runs])
    for sequence in (a, b):
        same_states(runs, sequence, rope)


@pytest.mark.parametrize(
    ("policy", "budget", "formats", "residual", "group", "d_k", "d_v", "rope"), PROMPTS
)
def test_policies_of_prompts(make_cpu, policy, budget, formats, residual, group, d_k, d_v, rope):
    shapes, runs = runs_of(make_cpu, policy, budget, formats, residual, group, d_k, d_v, rope)
    text, other = text_of(260, shapes), text_of(85, shapes, seed=1)
    a, b = ([run.store.new_sequence() for run in runs][0] for _ in range(2))
    for first, last in ((0, 140), (140, 230)):
        for run in runs:
            run.store.begin_prompt(a)
        same([run.write([(a, text.part(first, last))]) for run in runs])
        cpu, expected = (run.end_prompt(a)[1] for run in runs)
        assert cpu.keys() == expected.keys()
        for layer, sums in cpu.items():
            np.testing.assert_allclose(sums, expected[layer], rtol=1e-5, atol=1e-5)
        same_states(runs, a)
        same([run.read(a, text.part(230, 233), 1) for run in runs])
    # a sequence that the policy has not acted on, in one batch with one that it has
    same([run.write([(a, text.part(233, 260)), (b, other)]) for run in runs])
    same([run.write([(b, text.part(0, 1)), (a, text.part(1, 2))]) for run in runs])
    for run in runs:
        run.end_prompt(b)
    for sequence in (a, b):
        same_states(runs, sequence)


def test_contexts_of_several_chunks(make_cpu):
    """More than 512 cells a head, and tables that grow while rows are decided."""
    shapes, runs = runs_of(make_cpu, "h2o", "540", CODED, 0, 4, 32, 32, None)
    text = text_of(610, shapes)
    sequence = [run.store.new_sequence() for run in runs][0]
    same([run.write([(sequence, text.part(0, 600))]) for run in runs])
    for i in range(600, 604):
        same([run.write([(sequence, text.part(i, i + 1))]) for run in runs])
    same_states(runs, sequence)


def test_a_key_that_is_no_number_is_named(make_cpu):
    from pykv.errors import NumericsError

    shapes, runs = runs_of(make_cpu, "h2o", "64", EXACT, 0, 9, 33, 40, None)
    text = text_of(20, shapes)
    text.k[0][13, 1, 5] = np.nan
    for run in runs:
        sequence = run.store.new_sequence()
        with pytest.raises(NumericsError, match="layer 0, position 13"):
            run.write([(sequence, Text(text.q, text.k, text.v))])
        assert run.in_use() == 0
