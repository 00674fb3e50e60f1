"""The statistics against a slow computation with Python's own floats, and runs of two caches."""

import math

import numpy as np
import pytest

from pykv.config import CacheConfig
from pykv.engine.divergence import (
    DP_PERCENTILES,
    KLD_PERCENTILES,
    Tally,
    log_softmax,
    percentiles,
    standard_error,
)
from pykv.errors import ConfigError, NumericsError

TEXT = "The theory of an ancient anthem: the band and the hand, then another land. " * 12
ROUGH = CacheConfig(type_k="bf16", type_v="bf16")


def logits_of(n, vocabulary, spread=5.0, seed=0, change=0.3):
    """Baseline and tested logits, a little apart, and targets."""
    rng = np.random.default_rng(seed)
    base = spread * rng.standard_normal((n, vocabulary))
    tested = base + change * rng.standard_normal(base.shape)
    targets = rng.integers(0, vocabulary, n).astype(np.int32)
    return base.astype(np.float32), tested.astype(np.float32), targets


def run(base, tested, targets, cut=None):
    tally = Tally()
    for start in range(0, len(targets), cut or len(targets)):
        part = slice(start, start + (cut or len(targets)))
        tally.add(map(log_softmax, base[part]), tested[part], targets[part])
    return tally.result(1)


def slow_softmax(row):
    top = max(row)
    log_total = math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - top - log_total for x in row]


def slow_tokens(base, tested, targets):
    """Per token: -ln q(x), -ln p(x), divergence, q(x) - p(x), same top."""
    out = []
    for p_row, q_row, x in zip(base.tolist(), tested.tolist(), targets.tolist(), strict=True):
        p, q = slow_softmax(p_row), slow_softmax(q_row)
        kld = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a > -16)
        tops = p_row.index(max(p_row)), q_row.index(max(q_row))
        out.append((-q[x], -p[x], kld, math.exp(q[x]) - math.exp(p[x]), tops[0] == tops[1]))
    return out


def mean(values):
    return math.fsum(values) / len(values)


def error(values):
    return math.sqrt((mean([v * v for v in values]) - mean(values) ** 2) / (len(values) - 1))


def covariance(a, b):
    return (mean([x * y for x, y in zip(a, b, strict=True)]) - mean(a) * mean(b)) / (len(a) - 1)


def order(values, percent):
    values, at = sorted(values), percent / 100 * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


# float64 throughout: sums of a few hundred terms differ in their last digits, and the formulas
# with differences of squares lose some more
@pytest.mark.parametrize(
    ("n", "vocabulary", "spread"), [(157, 300, 5.0), (12, 65, 20.0), (11, 2, 1.0)]
)
def test_every_figure(n, vocabulary, spread):
    base, tested, targets = logits_of(n, vocabulary, spread)
    tokens = slow_tokens(base, tested, targets)
    q, p, kld, dp, same = ([float(t[i]) for t in tokens] for i in range(5))
    got = run(base, tested, targets)
    ppl_q, ppl_p = math.exp(mean(q)), math.exp(mean(p))
    se_q, se_p, cov = error(q), error(p), covariance(q, p)
    ratio_error = math.sqrt(se_q**2 + se_p**2 - 2 * cov)
    rms = math.sqrt(mean([d * d for d in dp]))
    share = mean(same)
    expected = {
        "perplexity": (ppl_q, ppl_q * se_q),
        "base_perplexity": (ppl_p, ppl_p * se_p),
        "log_ratio": (mean(q) - mean(p), ratio_error),
        "ratio": (ppl_q / ppl_p, ppl_q / ppl_p * ratio_error),
        "difference": (
            ppl_q - ppl_p,
            math.sqrt((ppl_q * se_q) ** 2 + (ppl_p * se_p) ** 2 - 2 * ppl_q * ppl_p * cov),
        ),
        "kld": (mean(kld), error(kld)),
        "dp": (mean(dp), error(dp)),
        "rms_dp": (rms, error([d * d for d in dp]) / (2 * rms)),
        "same_top": (share, math.sqrt(share * (1 - share) / (n - 1))),
    }
    for name, pair in expected.items():
        found = getattr(got, name)
        assert (found.value, found.error) == pytest.approx(pair, rel=1e-8, abs=1e-13), name
    assert got.correlation == pytest.approx(cov / (se_q * se_p), rel=1e-8)
    assert got.n_tokens == n
    for percent in KLD_PERCENTILES:
        assert got.kld_percentiles[percent] == pytest.approx(order(kld, percent), abs=1e-12)
    for percent in DP_PERCENTILES:
        assert got.dp_percentiles[percent] == pytest.approx(order(dp, percent), abs=1e-12)


@pytest.mark.parametrize("cut", [1, 7, 50])
def test_batches_do_not_matter(cut):
    base, tested, targets = logits_of(101, 40)
    assert run(base, tested, targets, cut) == run(base, tested, targets)


def test_results_so_far_do_not_change_what_follows():
    base, tested, targets = logits_of(60, 40)
    tally = Tally()
    for start, stop in ((0, 20), (20, 40), (40, 60)):
        part = slice(start, stop)
        tally.add(map(log_softmax, base[part]), tested[part], targets[part])
        assert tally.result(1) == run(base[:stop], tested[:stop], targets[:stop])


def test_no_difference_is_none_at_all():
    base, _, targets = logits_of(120, 50)
    got = run(base, base.copy(), targets)
    for name in ("log_ratio", "difference", "kld", "dp", "rms_dp"):
        assert (getattr(got, name).value, getattr(got, name).error) == (0, 0), name
    assert (got.ratio.value, got.ratio.error) == (1, 0)
    assert (got.same_top.value, got.same_top.error) == (1, 0)
    assert got.correlation == pytest.approx(1)
    assert set(got.kld_percentiles.values()) == set(got.dp_percentiles.values()) == {0}


def test_what_the_baseline_thinks_next_to_impossible_does_not_count():
    base = np.array([[0, -15.9, -16.1]], np.float32)
    tested = np.array([[0, -15.9, -1]], np.float32)
    # the normaliser of the first is 1 within 3e-7: ln p is -15.9 and -16.1; and of the second
    log_q = -math.log(1 + math.exp(-15.9) + math.exp(-1))
    counted = -log_q + math.exp(-15.9) * -log_q
    assert run(base, tested, np.array([0])).kld.value == pytest.approx(counted, abs=5e-7)


def test_a_better_guess_is_a_positive_change():
    base, tested = np.zeros((1, 4), np.float32), np.array([[0, 0, 9, 0]], np.float32)
    got = run(base, tested, np.array([2]))
    assert got.dp.value == pytest.approx(math.exp(9) / (math.exp(9) + 3) - 0.25)
    assert got.log_ratio.value < 0


def test_few_tokens_have_no_errors():
    base, tested, targets = logits_of(11, 30)
    few, enough = run(base[:10], tested[:10], targets[:10]), run(base, tested, targets)
    for name in ("perplexity", "log_ratio", "ratio", "difference", "kld", "dp", "rms_dp"):
        assert getattr(few, name).error == 0 < getattr(enough, name).error, name
    one = run(base[:1], tested[:1], targets[:1])
    assert (one.correlation, one.same_top.error) == (None, 0)


def test_log_softmax_of_extreme_logits():
    x = np.array([-3e38, 3e38, -np.inf, 0], np.float32)
    assert log_softmax(x)[1] == 0
    assert np.exp(log_softmax(x)).tolist() == [0, 1, 0, 0]
    x = np.random.default_rng(0).normal(0, 8, 3000).astype(np.float32)
    assert log_softmax(x) == pytest.approx(slow_softmax(x.tolist()), abs=1e-13)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_logits_that_are_no_numbers(bad, side):
    base, tested, targets = logits_of(3, 20)
    (base, tested)[side][1, targets[1]] = bad
    with pytest.raises(NumericsError, match="NaN or infinity"):
        run(base, tested, targets)


def test_the_standard_error_is_numpys():
    x = np.random.default_rng(0).gamma(2, size=1000)
    assert standard_error(x) == pytest.approx(x.std(ddof=1) / np.sqrt(1000))


def test_percentiles_interpolate():
    got = percentiles(np.array([4.0, 0.0, 1.0]), (100, 75, 50, 25, 0))
    assert got == {100: 4, 75: 2.5, 50: 1, 25: 0.5, 0: 0}


def test_to_dict_has_numbers_only():
    figures = run(*logits_of(120, 30)).to_dict()
    assert figures["kld"].keys() == {"value", "error"}
    assert list(figures["kld_percentiles"]) == list(KLD_PERCENTILES)

    def leaves(value):
        if isinstance(value, dict):
            for each in value.values():
                yield from leaves(each)
        else:
            yield type(value)

    assert set(leaves(figures)) == {int, float}


def at_once(model, base, ctx, n_chunks, bos=None):
    """The divergence of a model from another, whole chunks of logits in memory."""
    ids, tally, half = model.tokenizer.encode(TEXT, add_special=False), Tally(), ctx // 2
    for i in range(n_chunks):
        chunk = ids[i * ctx : (i + 1) * ctx]
        fed = [chunk[0] if bos is None else bos, *chunk[1:]]
        p, q = (m.logits(fed)[half : ctx - 1] for m in (base, model))
        tally.add(map(log_softmax, p), q, np.array(chunk[half + 1 :], np.int32))
    return tally.result(n_chunks)


def figures(divergence):
    """Its numbers, with their names."""
    flat = {"correlation": divergence.correlation, "n_tokens": divergence.n_tokens}
    for name, value in divergence.to_dict().items():
        if isinstance(value, dict):
            flat |= {f"{name} {key}": number for key, number in value.items()}
    return flat


class TestDivergence:
    def test_of_a_cache_from_itself_there_is_none(self, load):
        model = load()
        got = model.divergence(TEXT, ctx_size=64, chunks=4)
        assert (got.n_chunks, got.n_tokens) == (4, 4 * 31)
        for what in (got.kld, got.dp, got.rms_dp, got.log_ratio, got.difference):
            assert (what.value, what.error) == (0, 0)
        assert (got.same_top.value, got.kld_percentiles[100]) == (1, 0)
        assert got.perplexity == got.base_perplexity
        expected = model.perplexity(TEXT, ctx_size=64, chunks=4)
        assert got.perplexity.value == pytest.approx(expected.value, rel=1e-6)
        assert got.perplexity.error == pytest.approx(expected.error, rel=1e-5)
        assert model.store.nbytes == 0

    @pytest.mark.parametrize(("ubatch", "floats"), [(512, 8 << 20), (50, 263 * 16), (7, 263)])
    @pytest.mark.parametrize("bos", [False, True])
    def test_batches_give_what_whole_chunks_give(
        self, load, monkeypatch, small, ubatch, floats, bos
    ):
        monkeypatch.setattr("pykv.engine.perplexity.LOGIT_FLOATS", floats)
        how = {"ubatch": ubatch, "deterministic": True, "bos": bos}
        model, base = load(cache=ROUGH, **how), load(**how)
        got = model.divergence(TEXT, ctx_size=128, chunks=3)
        expected = at_once(model, base, 128, 3, bos=small.ID["<s>"] if bos else None)
        # the same numbers, joined in other pieces; every sum is over whole arrays
        assert figures(got) == figures(expected)
        assert 1e-9 < got.kld.value < 1e-3
        assert got.kld_percentiles[100] > got.kld.value

    def test_the_tested_cache_is_the_models_own(self, load, monkeypatch):
        """And the other f16, whatever the model has; each is asked for every token."""
        model, seen = load(cache=ROUGH), []
        real = model.step

        def step(batch, outputs, store=None):
            seen.append(((store or model.store).config.type_k, len(batch[0][1])))
            return real(batch, outputs, store=store)

        monkeypatch.setattr(model, "step", step)
        model.divergence(TEXT, ctx_size=64, chunks=2)
        counts = {name: sum(n for kind, n in seen if kind == name) for name, _ in seen}
        assert counts == {"bf16": 2 * 63, "f16": 2 * 63}

    def test_progress_is_told_of_every_chunk(self, load):
        told = []
        model = load(cache=ROUGH, deterministic=True)
        got = model.divergence(TEXT, ctx_size=64, chunks=3, progress=lambda *a: told.append(a))
        assert [t[:2] for t in told] == [(1, 3), (2, 3), (3, 3)]
        assert told[-1][2] == got
        assert told[0][2] == model.divergence(TEXT, ctx_size=64, chunks=1)

    def test_memory_holds_few_logits(self, load, monkeypatch):
        monkeypatch.setattr("pykv.engine.perplexity.LOGIT_FLOATS", 263 * 16)
        model, rows = load(cache=ROUGH), []
        real = model.step
        monkeypatch.setattr(
            model,
            "step",
            lambda batch, outputs, store=None: (
                rows.append(len(outputs)) or real(batch, outputs, store=store)
            ),
        )
        model.divergence(TEXT, ctx_size=256, chunks=1)
        assert (max(rows), sum(rows)) == (16, 2 * 127)

    @pytest.mark.parametrize("text", ["", "b" * 127])
    def test_a_short_text(self, load, text):
        with pytest.raises(ConfigError, match="and two chunks of 64 are needed"):
            load().divergence(text, ctx_size=64)

    def test_a_broken_model(self, load):
        model = load(broken=True)
        with pytest.raises(NumericsError):
            model.divergence(TEXT, ctx_size=64)
        assert model.store.nbytes == 0

    def test_an_interrupted_run_leaves_nothing_in_the_cache(self, load):
        model = load(cache=ROUGH)

        def stop(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.divergence(TEXT, ctx_size=64, progress=stop)
        assert model.store.nbytes == 0
