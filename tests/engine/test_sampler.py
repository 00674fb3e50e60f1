"""The sampler against a slow, obvious chain: every step on a full sorted list, in float64."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv.config import SamplingConfig
from pykv.engine.sampler import Sampler
from pykv.errors import ConfigError, GGUFError, NumericsError

OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def softmax(pairs):
    top = max(v for _, v in pairs)
    e = [math.exp(v - top) for _, v in pairs]
    total = math.fsum(e)
    return [x / total for x in e]


def near(a, b):
    return abs(a - b) < 1e-9


def reference(logits, history, suppress, s):
    """id -> probability, or None where a cut falls on a rounding error."""
    x = [float(v) for v in logits]
    n = s["repeat_last_n"]
    window = history if n < 0 else history[len(history) - n :] if n < len(history) else history
    window = [] if n == 0 else window
    for i in set(window):
        x[i] = x[i] / s["repeat_penalty"] if x[i] > 0 else x[i] * s["repeat_penalty"]
        x[i] -= window.count(i) * s["frequency_penalty"] + s["presence_penalty"]
        x[i] = float(np.float32(x[i]))
    pairs = [(i, v) for i, v in enumerate(x) if i not in suppress]
    pairs.sort(key=lambda p: (-p[1], p[0]))
    if s["temperature"] <= 0:
        return {pairs[0][0]: 1.0}
    if s["top_k"] > 0:
        pairs = pairs[: s["top_k"]]
    if s["typical_p"] < 1:
        p = softmax(pairs)
        entropy = -math.fsum(q * math.log(q) for q in p if q > 0)
        far = [abs(-math.log(q) - entropy) if q > 0 else math.inf for q in p]
        order = sorted(range(len(p)), key=lambda i: far[i])
        # of two equally typical ones either may go first: near misses are not compared
        if any(near(far[a], far[b]) for a, b in itertools.pairwise(order)):
            return None
        kept, total = [], 0.0
        for i in order:
            kept.append(i)
            total += p[i]
            if near(total, s["typical_p"]):
                return None
            if total > s["typical_p"]:
                break
        pairs = [pairs[i] for i in sorted(kept)]
    if s["top_p"] < 1:
        total, n = 0.0, 0
        for q in softmax(pairs):
            total, n = total + q, n + 1
            if near(total, s["top_p"]):
                return None
            if total >= s["top_p"]:
                break
        pairs = pairs[:n]
    if s["min_p"] > 0:
        floor = np.float32(pairs[0][1] + math.log(s["min_p"]))
        pairs = [p for n, p in enumerate(pairs) if n == 0 or np.float32(p[1]) >= floor]
    p = softmax([(i, v / s["temperature"]) for i, v in pairs])
    return {i: q for (i, _), q in zip(pairs, p, strict=True)}


def compare(logits, history, suppress, values):
    want = reference(logits, history, set(suppress), values)
    if want is None:
        return False
    sampler = Sampler(SamplingConfig(**values, seed=1), {}, len(logits), suppress)
    sampler.accept(history)
    before = logits.copy()
    ids, probs = sampler.candidates(logits)
    assert np.array_equal(logits, before), "the caller's logits were changed"
    got = {int(i): float(p) for i, p in zip(ids, probs, strict=True) if p > 0}
    assert got.keys() == {i for i, q in want.items() if q > 0}
    for i, q in got.items():
        assert q == pytest.approx(want[i], rel=1e-9, abs=1e-300)
    assert sampler.sample(logits) in got
    return True


CHANGES = {
    "temperature": [0.0, 0.3, 2.5],
    "top_k": [1, 7, 40, 10**9],
    "top_p": [0.0, 0.4, 0.95],
    "min_p": [0.02, 0.5, 1.5],
    "typical_p": [0.2, 0.9],
    "repeat_last_n": [0, 5, -1],
    "repeat_penalty": [1.3, 0.8],
    "presence_penalty": [0.7, -0.5],
    "frequency_penalty": [0.4],
}
PAIRS = [
    {a: x, b: y}
    for a, b in itertools.combinations(CHANGES, 2)
    for x in CHANGES[a]
    for y in CHANGES[b]
]


@pytest.mark.parametrize("n_vocab", [50, 9001])
def test_all_settings_pairwise(n_vocab):
    rng = np.random.default_rng(3)
    done = 0
    # the long vocabulary goes through the search by columns; a slow reference allows few of it
    for change in PAIRS if n_vocab == 50 else PAIRS[::11]:
        logits = rng.normal(0, 3, n_vocab).astype(np.float32)
        history = rng.integers(0, n_vocab, 90).tolist() + np.argsort(-logits)[:6].tolist() * 2
        values = OFF | {"repeat_penalty": 1.1} | change
        done += compare(logits, history, [3, int(logits.argmax()), n_vocab + 5], values)
    assert done > (230 if n_vocab == 50 else 20)


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=60),
    history=st.lists(st.integers(0, 1), max_size=80),
    suppress=st.lists(st.just(0), max_size=1),
    values=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.05, 0.8, 1.0, 30.0]),
            "top_k": st.integers(-1, 70),
            "top_p": st.floats(0, 1.1),
            "min_p": st.one_of(st.just(0.0), st.floats(1e-6, 1.1)),
            "typical_p": st.floats(0.01, 1.1),
            "repeat_last_n": st.integers(-1, 90),
            "repeat_penalty": st.floats(0.5, 2),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
        }
    ),
)
def test_any_settings(logits, history, suppress, values):
    compare(np.array(logits, np.float32), history, suppress, values)


@pytest.mark.parametrize("n_vocab", [100, 8192, 20_000, 3 * 4096])
@pytest.mark.parametrize("top_k", [1, 40, 1024, 5000])
def test_top_k_with_ties_takes_the_lower_ids(n_vocab, top_k):
    logits = np.random.default_rng(n_vocab + top_k).integers(-5, 3, n_vocab).astype(np.float32)
    want = np.lexsort((np.arange(n_vocab), -logits))[:top_k]
    ids, _ = Sampler(SamplingConfig(**OFF | {"top_k": top_k}), {}, n_vocab).candidates(logits)
    assert ids.tolist() == want.tolist()


@pytest.mark.parametrize("place", [0, 4095, 4096, 8191, 8192, 9000])
def test_the_maximum_is_found_wherever_it_lies(place):
    logits = np.zeros(9001, np.float32)
    logits[place] = 1
    for config in (SamplingConfig(temperature=0), SamplingConfig(top_k=1)):
        assert Sampler(config, {}, 9001).sample(logits) == place


def test_greedy_takes_the_first_maximum_after_penalties():
    logits = np.array([1, 5, 4, 5], np.float32)
    assert Sampler(SamplingConfig(temperature=0), {}, 4).sample(logits) == 1
    penalised = Sampler(SamplingConfig(temperature=0, repeat_penalty=2.0), {}, 4)
    penalised.accept([1, 3])
    assert penalised.sample(logits) == 2


@pytest.mark.parametrize("min_p", [0.0, 1e-9])
def test_top_p_over_a_whole_flat_vocabulary(min_p):
    n = 30_000
    logits = np.linspace(0, 0.5, n, dtype=np.float32)[::-1].copy()
    probs = np.exp(logits.astype(np.float64))
    want = int(np.searchsorted(np.cumsum(probs / probs.sum()), 0.7) + 1)
    config = SamplingConfig(**OFF | {"top_p": 0.7, "min_p": min_p})
    ids, got = Sampler(config, {}, n).candidates(logits)
    assert ids.tolist() == list(range(want))
    assert got.sum() == pytest.approx(1, abs=1e-12)


def test_top_p_ends_with_the_token_that_reaches_it():
    logits = np.zeros(8, np.float32)  # exactly 1/8 each
    for top_k in (0, 8):
        config = SamplingConfig(**OFF | {"top_p": 0.5, "top_k": top_k})
        assert Sampler(config, {}, 8).candidates(logits)[0].tolist() == [0, 1, 2, 3]


def test_typical_goes_on_until_it_exceeds():
    logits = np.zeros(8, np.float32)
    config = SamplingConfig(**OFF | {"typical_p": 0.5})
    assert len(Sampler(config, {}, 8).candidates(logits)[0]) == 5


def test_the_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler = Sampler(SamplingConfig(**OFF | {"seed": 11}), {}, 4)
    n = 20_000
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=4)
    # chi-squared with 3 degrees of freedom exceeds 16.27 with probability 0.001; the seed is fixed
    expected = n * np.array([0.5, 0.25, 0.125, 0.125])
    assert ((counts - expected) ** 2 / expected).sum() < 16.27


def test_the_random_stream_is_mt19937():
    # the standard's first outputs for seed 5489 (ISO C++ rand.predef gives the 10000th of them)
    low, high = 3499211612, 581869302
    u = (low + high * 2**32) / 2**64
    n = 1000
    sampler = Sampler(SamplingConfig(**OFF | {"seed": 5489}), {}, n)
    assert sampler.sample(np.zeros(n, np.float32)) == int(u * n)


def test_same_seed_same_tokens_and_fork_and_reset():
    rng = np.random.default_rng(0)
    steps = rng.normal(0, 3, (40, 500)).astype(np.float32)

    def run(sampler, steps):
        out = []
        for logits in steps:
            out.append(sampler.sample(logits))
            sampler.accept(out[-1:])
        return out

    config = SamplingConfig(seed=7, repeat_penalty=1.2)
    first = Sampler(config, {}, 500)
    text = run(first, steps)
    assert run(Sampler(config, {}, 500), steps) == text
    assert run(Sampler(SamplingConfig(seed=8, repeat_penalty=1.2), {}, 500), steps) != text
    half = Sampler(config, {}, 500)
    assert run(half, steps[:20]) == text[:20]
    twin = half.fork()
    assert run(half, steps[20:]) == text[20:]
    assert twin.n_history == 20
    assert run(twin, steps[20:]) == text[20:]
    twin.reset()
    assert run(twin, steps) == text
    twin.rewind(3)
    assert (twin.n_history, half.n_history) == (3, 40)


def test_without_a_seed_a_fresh_one_is_drawn_and_reported():
    seeds = {Sampler(SamplingConfig(seed=s), {}, 4).seed for s in [None, -1, None, -1]}
    assert len(seeds) == 4
    assert all(0 <= s < 2**32 for s in seeds)
    sampler = Sampler(SamplingConfig(), {}, 4)
    assert sampler.settings.seed == sampler.seed


def test_values_come_from_the_user_then_the_file_then_llama_cpp():
    metadata = {
        "general.sampling.temp": np.float32(0.5),
        "general.sampling.top_k": np.int32(9),
        "general.sampling.penalty_repeat": 1.5,
        "general.sampling.penalty_last_n": 12,
    }
    s = Sampler(SamplingConfig(top_k=3), metadata, 4).settings
    assert (s.temperature, s.top_k, s.repeat_penalty, s.repeat_last_n) == (0.5, 3, 1.5, 12)
    # common/common.h, struct common_params_sampling
    s = Sampler(SamplingConfig(), {}, 4).settings
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p) == (0.8, 40, 0.95, 0.05, 1.0)
    assert (s.repeat_last_n, s.repeat_penalty) == (64, 1.0)
    assert (s.presence_penalty, s.frequency_penalty) == (0.0, 0.0)


@pytest.mark.parametrize("value", ["hot", True, math.nan, math.inf, [1]])
def test_a_nonsensical_value_in_the_file_is_named(value):
    with pytest.raises(GGUFError, match="general.sampling.temp"):
        Sampler(SamplingConfig(), {"general.sampling.temp": value}, 4)


def test_a_step_that_is_missing_here_is_said(caplog):
    Sampler(SamplingConfig(), {"general.sampling.mirostat": 2, "general.sampling.sequence": ""}, 4)
    assert [r.getMessage() for r in caplog.records] == [
        "the model asks for general.sampling.mirostat = 2, which pykv does not have; ignored"
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": math.nan},
        {"top_p": math.inf},
        {"repeat_penalty": 0.0},
        {"repeat_last_n": -2},
        {"seed": -2},
        {"seed": 2**32},
    ],
)
def test_a_nonsensical_setting_is_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values)).replace("_", "-")):
        Sampler(SamplingConfig(**values), {}, 4)


def test_nothing_left_to_choose_from_is_refused():
    with pytest.raises(ConfigError, match="none can be chosen"):
        Sampler(SamplingConfig(), {}, 3, [0, 1, 2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n_vocab", [10, 9000])
@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0.0}, {"top_k": 0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}]
)
def test_broken_logits_stop(bad, n_vocab, values):
    for place in (0, n_vocab - 1):
        logits = np.zeros(n_vocab, np.float32)
        logits[place] = bad
        with pytest.raises(NumericsError, match="NaN or infinity"):
            Sampler(SamplingConfig(**values), {}, n_vocab).sample(logits)


def test_extreme_finite_logits_are_fine():
    logits = np.array([-3.4e38, 3.4e38, 0], np.float32)
    for temperature in (1e-300, 0.8, 1e300):
        config = SamplingConfig(**OFF | {"temperature": temperature, "seed": 1})
        ids, probs = Sampler(config, {}, 3).candidates(logits)
        assert probs.sum() == pytest.approx(1)
        assert ids[probs.argmax()] == (1 if temperature < 1e300 else 0)


def test_a_large_vocabulary_costs_no_sort(monkeypatch):
    n, sizes = 262_144, []

    def counting(real):
        def run(x, *args, **kwargs):
            sizes.append(np.asarray(x).size)
            return real(x, *args, **kwargs)

        return run

    for name in ("sort", "argsort", "partition", "argpartition"):
        monkeypatch.setattr(np, name, counting(getattr(np, name)))
    logits = np.random.default_rng(0).normal(0, 3, n).astype(np.float32)
    Sampler(SamplingConfig(seed=1), {}, n).sample(logits)
    assert 0 < max(sizes) <= n // 64
