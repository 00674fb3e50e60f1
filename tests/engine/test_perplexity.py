"""Perplexity against a plain computation from the model's logits, and the published figures."""

import json
import tracemalloc

import numpy as np
import pytest

import pykv
from pykv.config import CacheConfig, LoadConfig
from pykv.engine.logits_file import LogitsReader, LogitsWriter
from pykv.engine.perplexity import estimate, negative_log_likelihoods
from pykv.errors import ConfigError, NumericsError

TEXT = "The theory of an ancient anthem: the band and the hand, then another land. " * 12
EXACT = CacheConfig(type_k="f32", type_v="f32")
ROUGH = CacheConfig(type_k="bf16", type_v="bf16")


def plainly(model, text, ctx, n_chunks, bos=None):
    """Perplexity and error in float64, whole rows of logits at once."""
    ids, nll = model.tokenizer.encode(text, add_special=False), []
    for i in range(n_chunks):
        chunk = ids[i * ctx : (i + 1) * ctx]
        fed = [chunk[0] if bos is None else bos, *chunk[1:]]
        x = model.logits(fed).astype(np.float64)
        log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
        nll += [-log_p[t, chunk[t + 1]] for t in range(ctx // 2, ctx - 1)]
    value = np.exp(np.mean(nll))
    return value, value * np.std(nll) / np.sqrt(len(nll) - 1), len(nll)


class TestAgainstAPlainComputation:
    @pytest.mark.parametrize(("ctx", "chunks"), [(64, 3), (65, 2), (4, 7), (128, None)])
    def test_value_error_and_counts(self, load, ctx, chunks):
        model = load(cache=EXACT)
        got = model.perplexity(TEXT, ctx_size=ctx, chunks=chunks)
        n = len(model.tokenizer.encode(TEXT)) // ctx if chunks is None else chunks
        value, error, scored = plainly(model, TEXT, ctx, n)
        assert (got.n_chunks, got.n_tokens) == (n, scored)
        assert got.value == pytest.approx(value, rel=1e-4)
        assert got.error == pytest.approx(error, rel=1e-3)
        assert len(got.chunk_values) == n
        assert got.chunk_values[-1] == got.value
        if ctx > 4:  # its chunks have one target each, and so no error
            first, _, _ = plainly(model, TEXT, ctx, 1)
            assert got.chunk_values[0] == pytest.approx(first, rel=1e-4)
        assert model.store.nbytes == 0

    def test_each_chunk_begins_with_bos_where_the_vocabulary_wants_it(self, load, small):
        model, bos = load(cache=EXACT, bos=True), small.ID["<s>"]
        got = model.perplexity(TEXT, ctx_size=64, chunks=3).value
        assert got == pytest.approx(plainly(model, TEXT, 64, 3, bos=bos)[0], rel=1e-4)
        assert got != pytest.approx(plainly(model, TEXT, 64, 3)[0], rel=1e-3)

    def test_a_recited_text_is_expected(self, load, small):
        model = load(recite=True)
        text = ("\n" + small.RECITED) * 8
        # a token that the model expects has a logit of about 64, and others of 0 to 20: only the
        # newline, each 33rd token, is a surprise, of about 64 nats
        assert 4 < model.perplexity(text, ctx_size=64).value < 12
        assert model.perplexity(text[::-1], ctx_size=64).value > np.exp(40)

    def test_control_tokens_in_the_text_are_text(self, load):
        model = load(cache=EXACT)
        text = TEXT.replace("band", "<|im_end|>")
        expected = plainly(model, text, 64, 3)[0]
        assert model.perplexity(text, ctx_size=64, chunks=3).value == pytest.approx(expected, 1e-4)

    def test_bytes_are_a_text_too(self, load):
        model = load()
        got = {model.perplexity(t, ctx_size=64, chunks=2).value for t in (TEXT, TEXT.encode())}
        assert len(got) == 1


class TestSplits:
    def test_ubatch_matters_little(self, load):
        values = [load(ubatch=n).perplexity(TEXT, ctx_size=128).value for n in (1, 16, 50, 512)]
        # mean KL divergence of at most 1e-5 between splits moves the mean of the likelihoods by
        # far less than 0.1 %
        assert values == pytest.approx([values[0]] * 4, rel=1e-3)

    def test_and_not_at_all_when_deterministic(self, load):
        made = [
            load(ubatch=n, deterministic=True).perplexity(TEXT, ctx_size=128) for n in (16, 50, 512)
        ]
        assert made[0] == made[1] == made[2]


def test_progress_is_told_of_every_chunk(load):
    told = []
    got = load().perplexity(TEXT, ctx_size=64, chunks=3, progress=lambda *a: told.append(a))
    assert [t[:2] for t in told] == [(1, 3), (2, 3), (3, 3)]
    assert tuple(t[2] for t in told) == got.chunk_values
    assert all(t[3] > 0 for t in told)


def test_memory_does_not_hold_the_logits_of_a_chunk(load, monkeypatch):
    monkeypatch.setattr("pykv.engine.perplexity.LOGIT_FLOATS", 263 * 16)
    model, rows = load(), []
    real = model.step
    monkeypatch.setattr(
        model, "step", lambda batch, outputs: rows.append(len(outputs)) or real(batch, outputs)
    )
    model.perplexity(TEXT, ctx_size=256, chunks=1)
    assert max(rows) == 16
    assert sum(rows) == 127
    tracemalloc.start()
    try:
        model.perplexity(TEXT, ctx_size=256, chunks=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # a chunk's logits would be 127 rows; twice 16 rows, the activations and the tables are less
    assert peak < 3 << 20


class TestRefusals:
    @pytest.mark.parametrize("ctx", [-1, 0, 1, 3, 513])
    def test_chunk_sizes_that_make_no_sense(self, load, ctx):
        with pytest.raises(ConfigError, match="a chunk (needs at least 4|of 513) tokens"):
            load().perplexity(TEXT, ctx_size=ctx)

    @pytest.mark.parametrize("chunks", [0, -1])
    def test_counts_of_chunks_that_make_no_sense(self, load, chunks):
        with pytest.raises(ConfigError, match=r"chunks must be 1 or more, or None for all"):
            load().perplexity(TEXT, ctx_size=64, chunks=chunks)

    @pytest.mark.parametrize("text", ["", "b", "b" * 127])
    def test_a_short_text(self, load, text):
        with pytest.raises(ConfigError, match=rf"the text has {len(text)} tokens, and two chunks"):
            load().perplexity(text, ctx_size=64)

    def test_a_broken_model(self, load):
        model = load(broken=True)
        with pytest.raises(NumericsError):
            model.perplexity(TEXT, ctx_size=64)
        assert model.store.nbytes == 0

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_logits_that_are_no_numbers(self, bad):
        logits = np.zeros((2, 5), np.float32)
        logits[1, 3] = bad
        with pytest.raises(NumericsError, match="NaN or infinity"):
            negative_log_likelihoods(logits, np.array([0, 3], np.int32))


def test_likelihoods_of_large_logits():
    x = np.array([[0, 1e4, 1e4 - 1], [-3e38, 3e38, 0]], np.float32)
    got = negative_log_likelihoods(x, np.array([2, 1], np.int32))
    # -ln(e^-1 / (1 + e^-1)), and certainty
    assert got == pytest.approx([1.3132616875, 0.0], abs=1e-7)


def test_the_error_is_the_standard_error_of_the_mean():
    nll = np.random.default_rng(0).gamma(2, size=1000)
    value, error = estimate(nll)
    assert value == pytest.approx(np.exp(nll.mean()))
    assert error == pytest.approx(value * nll.std(ddof=1) / np.sqrt(1000))
    assert estimate(np.array([2.0])) == (pytest.approx(np.exp(2.0)), 0.0)


class TestFilesOfLogits:
    @pytest.fixture
    def base(self, load, tmp_path):
        """A file of three chunks of 64 tokens, by the f16 cache."""
        model = load(deterministic=True)
        with LogitsWriter(tmp_path / "base.kld") as writer:
            got = model.perplexity(TEXT, ctx_size=64, chunks=3, save_logits=writer)
        assert got == model.perplexity(TEXT, ctx_size=64, chunks=3)
        with LogitsReader(tmp_path / "base.kld") as reader:
            yield reader

    def test_the_file_holds_the_tokens_and_the_logits(self, load, base):
        model = load(deterministic=True)
        ids = model.tokenizer.encode(TEXT, add_special=False)[: 3 * 64]
        assert base.tokens.ravel().tolist() == ids
        assert (base.extent.n_ctx, base.extent.n_vocab) == (64, model.n_vocab)
        x = model.logits(ids[64:128])[32:63].astype(np.float64)
        log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
        reach = (x - x.max(-1, keepdims=True)) > -16
        # half of a step of 16 / 65535
        off = np.abs(base.read(1, 0, 31) - log_p)[reach]
        assert off.max() < 0.5 * 16 / 65535 + 5e-6

    @pytest.mark.parametrize("floats", [8 << 20, 263 * 5])
    def test_a_run_against_a_file_is_near_one_against_a_cache(
        self, load, monkeypatch, base, floats
    ):
        monkeypatch.setattr("pykv.engine.perplexity.LOGIT_FLOATS", floats)
        model = load(cache=ROUGH, deterministic=True)
        got = model.divergence(base=base)
        expected = model.divergence(TEXT, ctx_size=64, chunks=3)
        assert (got.n_chunks, got.n_tokens) == (3, 93)
        assert got.perplexity == expected.perplexity
        # a code is off by 1.2e-4 at most, and so is ln p(x); their mean by far less
        assert got.base_perplexity.value == pytest.approx(expected.base_perplexity.value, rel=5e-5)
        # a token's divergence is off by the mean over p of errors that have no sign in common
        assert got.kld.value == pytest.approx(expected.kld.value, abs=2e-5)
        assert got.rms_dp.value == pytest.approx(expected.rms_dp.value, abs=1e-4)

    def test_the_file_is_what_the_run_is_compared_with(self, load, base, tmp_path):
        """A file of uniform predictions: a divergence that can be told from the entropy."""
        n_vocab, path = base.extent.n_vocab, tmp_path / "uniform.kld"
        with LogitsWriter(path) as writer:
            writer.begin(base.tokens, n_vocab)
            writer.add(np.zeros((93, n_vocab), np.float32))
        model = load(deterministic=True)
        with LogitsReader(path) as reader:
            got = model.divergence(base=reader, chunks=2)
        assert got.base_perplexity.value == pytest.approx(n_vocab, rel=1e-5)
        kld = []
        for chunk in base.tokens[:2]:
            x = model.logits(chunk.tolist())[32:63].astype(np.float64)
            log_q = x - np.log(np.exp(x).sum(-1, keepdims=True))
            kld += list((-np.log(n_vocab) - log_q).mean(-1))
        assert got.kld.value == pytest.approx(np.mean(kld), rel=1e-5)
        assert got.kld_percentiles[100] == pytest.approx(max(kld), rel=1e-5)

    def test_some_chunks_of_it(self, load, base):
        model = load(cache=ROUGH)
        assert model.divergence(base=base, chunks=2).n_chunks == 2
        assert model.divergence(base=base, chunks=9).n_chunks == 3
        with pytest.raises(ConfigError, match="chunks must be 1 or more"):
            model.divergence(base=base, chunks=0)

    def test_a_context_that_is_too_small(self, load, base):
        with pytest.raises(ConfigError, match=r"chunks of 64 tokens, and the context holds 63"):
            load(ctx_size=63).divergence(base=base)

    def test_another_models_vocabulary(self, load, tmp_path):
        with LogitsWriter(tmp_path / "other.kld") as writer:
            writer.begin(np.zeros((1, 4), np.int32), 262)
            writer.add(np.zeros((1, 262), np.float32))
        with (
            LogitsReader(tmp_path / "other.kld") as reader,
            pytest.raises(ConfigError, match="of 262 tokens, and this model's has 263"),
        ):
            load().divergence(base=reader)

    def test_either_a_text_or_a_file(self, load, base):
        with pytest.raises(ConfigError, match="give either a text, or a file"):
            load().divergence()
        with pytest.raises(ConfigError, match="give either a text, or a file"):
            load().divergence(TEXT, base=base)

    def test_an_interrupted_run_leaves_no_file(self, load, tmp_path):
        def stop(*_):
            raise KeyboardInterrupt

        def write():
            with LogitsWriter(tmp_path / "base.kld") as writer:
                load().perplexity(TEXT, ctx_size=64, progress=stop, save_logits=writer)

        with pytest.raises(KeyboardInterrupt):
            write()
        assert list(tmp_path.iterdir()) == []


NAMES = {"smollm2_path": "smollm2-135m-instruct-q4_1", "gemma_path": "gemma-3-270m-q4_k_m"}


@pytest.mark.models
class TestPublishedFigures:
    """transformers in float32, and llama.cpp, on the same file and text."""

    def measure(self, path, shared_data, chunks):
        text = (shared_data / "wikitext2.test.txt").read_bytes().removesuffix(b"\n")
        text = text[: chunks * 512 * 8]  # tokens are 4 bytes or so; the rest would be in vain
        # one thread: two of the BLAS wait for each other where the machine is busy
        with pykv.load(path, load=LoadConfig(ctx_size=512, threads=1)) as model:
            return model.perplexity(text, chunks=chunks).value

    def figures(self, shared_data, name):
        known = json.loads((shared_data / "reference.json").read_text())
        few, many = known["transformers"]["perplexity 4 chunks / 16 chunks"][name]
        llama_cpp = known["llama.cpp"]["perplexity [value, error]"][name]["f16"][0]
        return few, many, llama_cpp

    def test_four_chunks(self, smollm2_path, shared_data):
        expected, _, _ = self.figures(shared_data, NAMES["smollm2_path"])
        assert self.measure(smollm2_path, shared_data, 4) == pytest.approx(expected, rel=0.002)

    @pytest.mark.slow
    @pytest.mark.parametrize("fixture", NAMES)
    def test_sixteen_chunks(self, request, fixture, shared_data):
        _, expected, llama_cpp = self.figures(shared_data, NAMES[fixture])
        got = self.measure(request.getfixturevalue(fixture), shared_data, 16)
        assert got == pytest.approx(expected, rel=0.002)
        # which rounds activations to 8 bits, too
        assert got == pytest.approx(llama_cpp, rel=0.015)
