"""Policies that act when a prompt ends, against attention and selections worked out here."""

from __future__ import annotations

import numpy as np
import pytest
from kept_oracle import Lists, Run, Token, text_of
from page_oracle import ROPE

from pykv.backends.base import PAGE
from pykv.policies.base import Cells, Window

CASES = [
    ("snapkv", "70", ("f16", "f16"), 0),
    ("snapkv:window=8,pool=3", "40%", ("q8_0", "q4_1", None, "none", "none"), 20),
    ("fastgen:window=20,recovery=0.8", None, ("f16", "f16"), 0),
    ("fastgen:window=20,recovery=0.7", None, ("int8", "fp8_e4m3"), 10),
]
CASE = pytest.mark.parametrize(("policy", "budget", "formats", "residual"), CASES)


class Prompts(Lists):
    """Lists that are cut when a prompt ends."""

    first = 0  # the first position whose query counts

    def read(self, n):
        """Tokens join; as many as the residual stay exact, and up to 63 more."""
        for _ in range(n):
            for tokens in self.heads.values():
                if self.n >= self.sinks:
                    tokens.append(Token(self.n))
            self.n += 1
            self.seal(before=0)

    def seal(self, before):
        """What the tail has too much of: of plain sequences after a token, else before the next."""
        for (layer, _), tokens in self.heads.items():
            tail = [t for t in tokens if not t.sealed]
            if len(tail) >= self.limit(layer) + before:
                for token in tail[:PAGE]:
                    token.sealed = True

    def select(self):
        """The last queries' sums {layer: f64 [H, tokens]}; what does not stay is dropped."""
        policy = self.policy
        low = max(self.n - policy.n_queries, self.first)
        sums, n_queries = {}, self.n - low
        for layer in self.run.layers:
            shape = self.run.shapes[layer]
            group = shape.n_head // shape.n_kv
            most = max(len(self.heads[layer, g]) for g in range(shape.n_kv))
            positions = np.full((shape.n_kv, most), -1, np.int32)
            sums[layer] = np.zeros((shape.n_head, most), np.float32)
            for g in range(shape.n_kv):
                tokens = self.heads[layer, g]
                positions[g, : len(tokens)] = [t.position for t in tokens]
                for now in range(low, self.n):
                    p, _ = self.shares(layer, g, now, self.text.q[layer][now])
                    p = p[:, min(self.sinks, now + 1) :]
                    sums[layer][g * group : (g + 1) * group, : p.shape[1]] += p
            cells = Cells(
                positions, np.zeros((0, *positions.shape), np.float32), self.n - 1,
                self.sinks + most, group, self.sinks,
            )  # fmt: skip
            cells.n_kept = self.sinks + len(self.heads[0, 0])
            window = Window(sums[layer], n_queries, np.zeros(positions.shape, np.uint8))
            budget = self.budget() if self.run.config.budget else 0
            stay = policy.select(cells, window, budget)
            for g in range(shape.n_kv):
                tokens = self.heads[layer, g]
                self.heads[layer, g] = [t for t, s in zip(tokens, stay[g], strict=False) if s]
        self.first = self.n
        return sums

    def check(self, run, sequence):
        for layer, head in self.heads:
            assert run.store.positions(sequence, layer, head) == self.positions(layer, head)


@CASE
@pytest.mark.parametrize("size", [150, 7])
def test_selection_at_a_prompts_end(policy, budget, formats, residual, size):
    n, answer = 150, 5
    # where encoded keys are turned, float32's rounding may show in a code
    run = Run(policy, budget, formats, residual=residual)
    text, sequence = text_of(n + answer, seed=4), run.store.new_sequence()
    run.store.begin_prompt(sequence)
    run.read(sequence, text.part(0, n), size)
    lists = Prompts(run, text, sequence)
    lists.read(n)
    ending, sums = run.end_prompt(sequence)
    assert ending.step.positions[-1] == n - 1
    expected = lists.select()
    for layer, own in expected.items():
        cells = sums[layer][:, 1:].reshape(len(own), -1)
        np.testing.assert_allclose(cells[:, : own.shape[1]], own, rtol=2e-5, atol=1e-6)
        assert not cells[:, own.shape[1] :].any()
        # a row and the sinks' share add up to the queries
        np.testing.assert_allclose(sums[layer].sum((1, 2)), ending.step.n_rows, rtol=1e-5)
    lists.check(run, sequence)
    # what is generated stays
    for i in range(n, n + answer):
        run.write([(sequence, text.part(i, i + 1))])
        lists.read(1)
        lists.check(run, sequence)
    run.store.free(sequence)
    assert run.in_use() == 0


@pytest.mark.parametrize(("policy", "budget", "formats", "residual"), CASES[1:3])
def test_how_a_prompt_is_batched_leaves_no_trace(policy, budget, formats, residual):
    text, seen = text_of(330, seed=4), []
    for size in (150, 13):
        run = Run(policy, budget, formats, residual=residual, rope=ROPE)
        sequence, outs = run.store.new_sequence(), []
        for first, last in ((0, 150), (150, 330)):
            run.store.begin_prompt(sequence)
            outs += run.read(sequence, text.part(first, last), size)
            run.end_prompt(sequence)
        seen.append((run.state(sequence), run.store.nbytes, outs))
    assert seen[0][:2] == seen[1][:2]
    for a, b in zip(seen[0][2], seen[1][2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("policy", "budget", "formats", "residual"), CASES[:1] + CASES[2:3])
def test_a_second_prompt_over_ragged_heads(policy, budget, formats, residual):
    run, text = Run(policy, budget, formats, residual=residual), text_of(320, seed=4)
    sequence = run.store.new_sequence()
    lists = Prompts(run, text, sequence)
    for first, last in ((0, 150), (150, 320)):
        run.store.begin_prompt(sequence)
        step = run.begin([(sequence, text.part(first, last))])
        outs = run.attend(step)
        for row in range(last - first):
            lists.read(1)
            if row % 40 == 0:
                _check_row(lists, outs, row)
        run.store.commit()
        _, sums = run.end_prompt(sequence)
        expected = lists.select()
        assert sums.keys() == expected.keys()
        lists.check(run, sequence)
    numbers = {len(tokens) for tokens in lists.heads.values()}
    assert (len(numbers) > 1) == policy.startswith("fastgen")


def _check_row(lists, outs, row):
    for layer, expected in lists.attend().items():
        error = np.linalg.norm(outs[layer][row] - expected, axis=-1)
        assert (error <= 1e-5 * np.linalg.norm(expected, axis=-1)).all()


def test_a_batch_of_sequences_before_and_after_a_selection():
    text, fresh = text_of(200), text_of(180, seed=5)
    formats = ("q8_0", "q4_1", None, "none", "none")
    together, alone = (Run("snapkv:window=8", "70", formats, residual=3) for _ in range(2))
    for run in (together, alone):
        run.a, run.b = run.store.new_sequence(), run.store.new_sequence()
        run.read(run.a, text.part(0, 120))
        run.end_prompt(run.a)
    outs = together.write([(together.a, text.part(120, 200)), (together.b, fresh)])
    own = [alone.read(alone.a, text.part(120, 200)), alone.read(alone.b, fresh)]
    for out, parts in zip(outs, zip(*own, strict=True), strict=True):
        np.testing.assert_allclose(out, np.concatenate(parts), rtol=1e-5, atol=1e-6)
    for run in (together, alone):
        run.end_prompt(run.b)
    assert together.state(together.a) == alone.state(alone.a)
    assert together.state(together.b) == alone.state(alone.b)


def test_h2o_reads_a_prompt_whole_and_reduces_it_once():
    run, text = Run("h2o:prompt=full", "70", ("f16", "q4_1")), text_of(230)
    sequence = run.store.new_sequence()
    lists = Lists(run, text, sequence)
    for first, last in ((0, 150), (150, 230)):
        run.store.begin_prompt(sequence)
        lists.reading = True
        run.read(sequence, text.part(first, last), 50)
        for _ in range(first, last):
            lists.begin()
            lists.attend()
            lists.decide()
        assert len(run.store.positions(sequence, 0, 0)) == len(lists.positions(0, 0))
        run.end_prompt(sequence)
        lists.reading = False
        kept = len(lists.positions(0, 0))
        lists.drop(kept - 70, kept)
        for layer, head in lists.heads:
            assert run.store.positions(sequence, layer, head) == lists.positions(layer, head)
        assert (run.kept(sequence).cells - run.kept(sequence).live).max() < PAGE


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("policy", "budget"), [("snapkv:window=8", "70"), ("h2o:prompt=full", "70")]
)
def test_a_selection_or_a_batch_that_fails_changes_nothing(policy, budget, monkeypatch):
    text = text_of(150)
    run, plain = (Run(policy, budget, ("q8_0", "f16")) for _ in range(2))
    for r in (run, plain):
        r.s = r.store.new_sequence()
        r.store.begin_prompt(r.s)
        r.read(r.s, text.part(0, 130))
    # the queries of tokens that are given up are forgotten
    run.attend(run.begin([(run.s, text.part(130, 150))]))
    run.store.abort()
    before = run.in_use(), run.store.positions(run.s, 0, 0)

    def stop(*args):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(run.backend, "move", stop)
        with pytest.raises(Stop):
            run.end_prompt(run.s)
    assert (run.in_use(), run.store.positions(run.s, 0, 0)) == before
    for r in (run, plain):
        r.end_prompt(r.s)
    assert run.state(run.s) == plain.state(plain.s)
    assert run.in_use() == plain.in_use() <= before[0]
