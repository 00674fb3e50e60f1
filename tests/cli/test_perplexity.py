import json
import os

import numpy as np
import pytest

from pykv.engine.divergence import Tally, log_softmax
from pykv.engine.logits_file import LogitsReader, LogitsWriter

TOKENS = np.array([[3, 1, 4, 1, 2, 0, 5, 6]] * 2, np.int32)  # two chunks of 8: 3 rows each


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"one two\xff three\n\n")
    return file


def test_the_last_line_is_llama_perplexitys(pykv, corpus):
    result = pykv("perplexity", corpus)
    assert (result.code, result.out) == (0, "Final estimate: PPL = 12.3457 +/- 0.76543\n")
    assert "[1/2] PPL 12.0000" in result.err
    assert pykv("perplexity", "-f", corpus, "-q").err == ""


def test_the_engine_gets_the_bytes_less_one_newline_and_512_tokens(pykv, corpus):
    result = pykv("perplexity", corpus, "-m", "m.gguf", "--chunks", "3", "-ctk", "q8_0")
    load, run = result.calls[-2:]
    assert (load["model"], load["load"].ctx_size, load["cache"].type_k) == ("m.gguf", 512, "q8_0")
    assert run == {"text": b"one two\xff three\n", "ctx_size": 512, "chunks": 3}
    load, run = pykv("perplexity", corpus, "-c", "64").calls[-2:]
    assert (load["load"].ctx_size, run["ctx_size"], run["chunks"]) == (64, 64, None)


def test_standard_input(pykv):
    assert pykv("perplexity", "-", stdin=b"abc\n").calls[-1]["text"] == b"abc"


def test_json(pykv, corpus):
    found = json.loads(pykv("perplexity", corpus, "--json").out)
    assert (found["perplexity"], found["error"]) == (12.34567, 0.765432)
    assert (found["chunks"], found["tokens"], found["chunk_values"]) == (2, 510, [12.0, 12.7])


def a_divergence(n):
    """Of n tokens' random predictions over nine tokens."""
    rng, tally = np.random.default_rng(0), Tally()
    base = rng.standard_normal((n, 9)).astype(np.float32)
    tested = base + np.float32(0.1) * rng.standard_normal(base.shape).astype(np.float32)
    tally.add(map(log_softmax, base), tested, rng.integers(0, 9, n))
    return tally.result(2)


@pytest.fixture
def diverging(engine, monkeypatch):
    """diverging(n) gives the fake model a divergence of n tokens, which it tells twice."""

    def give(n):
        made = a_divergence(n)

        def divergence(self, text=None, *, base=None, ctx_size=512, chunks=None, progress=None):
            engine.calls.append(
                {"text": text, "base": base, "ctx_size": ctx_size, "chunks": chunks}
            )
            progress(1, 2, made, 0.1)
            progress(2, 2, made, 0.1)
            return made

        monkeypatch.setattr(engine.Model, "divergence", divergence, raising=False)
        return made

    return give


@pytest.fixture
def base(tmp_path):
    """A file of logits, of seven tokens' predictions."""
    path = tmp_path / "base.kld"
    with LogitsWriter(path) as writer:
        writer.begin(TOKENS, 7)
        writer.add(np.zeros((6, 7), np.float32))
    return path


NAMES = [
    "Perplexity statistics", "Mean PPL(Q)", "Mean PPL(base)", "Cor(ln(PPL(Q)), ln(PPL(base)))",
    "Mean ln(PPL(Q)/PPL(base))", "Mean PPL(Q)/PPL(base)", "Mean PPL(Q)-PPL(base)", "",
    "KL divergence statistics, in nats", "Mean KLD", "Maximum KLD", "99.9 % KLD", "99.0 % KLD",
    "95.0 % KLD", "90.0 % KLD", "Median KLD", "10.0 % KLD", "5.0 % KLD", "1.0 % KLD", "0.1 % KLD",
    "Minimum KLD", "", "Token probability statistics", "Mean Δp", "Maximum Δp", "99.9 % Δp",
    "99.0 % Δp", "95.0 % Δp", "90.0 % Δp", "75.0 % Δp", "Median Δp", "25.0 % Δp", "10.0 % Δp",
    "5.0 % Δp", "1.0 % Δp", "0.1 % Δp", "Minimum Δp", "RMS Δp", "Same top p",
]  # fmt: skip


class TestDivergence:
    def test_all_names_and_their_figures(self, pykv, corpus, diverging):
        made = diverging(100)
        result = pykv("perplexity", corpus, "--kl-divergence")
        lines = result.out.splitlines()
        assert (result.code, [line.partition(" :")[0].rstrip() for line in lines]) == (0, NAMES)
        shown = {line.partition(" :")[0].rstrip(): line.partition(" :")[2] for line in lines}

        def numbers(name):
            return [float(x) for x in shown[name].replace("+/-", " ").replace("%", " ").split()]

        plain, share = {"abs": 6e-7}, {"abs": 6e-5}  # the last digit that is shown
        for name, what in {
            "Mean PPL(Q)": made.perplexity,
            "Mean PPL(base)": made.base_perplexity,
            "Mean ln(PPL(Q)/PPL(base))": made.log_ratio,
            "Mean PPL(Q)/PPL(base)": made.ratio,
            "Mean PPL(Q)-PPL(base)": made.difference,
            "Mean KLD": made.kld,
        }.items():
            assert numbers(name) == pytest.approx([what.value, what.error], **plain)
        for name, what in {
            "Mean Δp": made.dp,
            "RMS Δp": made.rms_dp,
            "Same top p": made.same_top,
        }.items():
            assert numbers(name) == pytest.approx([100 * what.value, 100 * what.error], **share)
        assert numbers("Cor(ln(PPL(Q)), ln(PPL(base)))") == pytest.approx(
            [100 * made.correlation], **share
        )
        for name, percent in {"Maximum": 100, "99.9 %": 99.9, "Median": 50, "5.0 %": 5}.items():
            assert numbers(f"{name} KLD") == pytest.approx([made.kld_percentiles[percent]], **plain)
            assert numbers(f"{name} Δp") == pytest.approx(
                [100 * made.dp_percentiles[percent]], **share
            )

    def test_a_line_for_each_chunk(self, pykv, corpus, diverging):
        made = diverging(100)
        lines = pykv("perplexity", corpus, "--kl-divergence").err.splitlines()
        assert lines[-2:] == [
            f"[{i}/2] PPL {made.perplexity.value:.4f} +/- {made.perplexity.error:.4f}, "
            f"ln ratio {made.log_ratio.value:.5f} +/- {made.log_ratio.error:.5f}, "
            f"KLD {made.kld.value:.6f} +/- {made.kld.error:.6f}, "
            f"RMS Δp {100 * made.rms_dp.value:.3f} +/- {100 * made.rms_dp.error:.3f} %, "
            f"same top p {100 * made.same_top.value:.3f} +/- {100 * made.same_top.error:.3f} %, "
            "0.10 s a chunk"
            for i in (1, 2)
        ]
        assert pykv("perplexity", corpus, "--kl-divergence", "-q").err == ""

    def test_few_tokens_have_no_statistics(self, pykv, corpus, diverging):
        made = diverging(99)
        result = pykv("perplexity", corpus, "--kl-divergence")
        assert result.out.startswith(f"PPL {made.perplexity.value:.4f} +/- ")
        assert result.out.count("\n") == 1
        assert "99 tokens were scored; from 100 on, all statistics are shown" in result.err

    def test_json(self, pykv, corpus, diverging):
        made = diverging(99)
        found = json.loads(pykv("perplexity", corpus, "--kl-divergence", "--json").out)
        assert found["kld"] == {"value": made.kld.value, "error": made.kld.error}
        assert found["dp_percentiles"]["99.9"] == made.dp_percentiles[99.9]
        assert (found["n_tokens"], found["ctx_size"], found["model"]) == (99, 512, "default.gguf")
        assert [r["same_top"] for r in found["running"]] == [made.same_top.value] * 2
        assert found["correlation"] == made.correlation

    def test_the_engine_gets_the_text_and_the_tested_cache(self, pykv, corpus, diverging):
        diverging(9)
        args = ("perplexity", corpus, "--kl-divergence", "-ctv", "q4_0", "-c", "64")
        load, run = pykv(*args).calls[-2:]
        assert (load["cache"].type_v, load["load"].ctx_size) == ("q4_0", 64)
        assert run == {
            "text": b"one two\xff three\n", "base": None, "ctx_size": 64, "chunks": None
        }  # fmt: skip


class TestBaseFile:
    def test_text_and_context_come_from_the_file(self, pykv, base, diverging):
        diverging(9)
        args = ("perplexity", "--kl-divergence", "--kl-divergence-base", base)
        load, run = pykv(*args).calls[-2:]
        assert (load["load"].ctx_size, run["text"], run["chunks"]) == (8, None, None)
        assert run["base"].tokens.tolist() == TOKENS.tolist()
        load, run = pykv(*args, "-c", "64", "--chunks", "1").calls[-2:]
        assert (load["load"].ctx_size, run["chunks"]) == (64, 1)
        assert json.loads(pykv(*args, "-c", "64", "--json").out)["ctx_size"] == 8

    def test_a_text_beside_it_is_not_read(self, pykv, base, diverging):
        diverging(9)
        args = ("perplexity", "none.txt", "--kl-divergence", "--kl-divergence-base", base)
        result = pykv(*args)
        assert (result.code, result.calls[-1]["text"]) == (0, None)
        assert f"the text is the one that {base} was written from; none.txt is not" in result.err

    def test_a_file_that_is_none_ends_it_before_the_model_is_loaded(self, pykv, corpus, diverging):
        diverging(9)
        result = pykv("perplexity", "--kl-divergence", "--kl-divergence-base", corpus)
        assert (result.code, result.calls) == (2, [])
        assert result.err == (
            f"error: {corpus} is no file of logits, which begins with _logits_: "
            "write one with --save-all-logits\n"
        )
        result = pykv("perplexity", "--kl-divergence", "--kl-divergence-base", "none.kld")
        assert (result.code, result.err) == (1, "error: none.kld: No such file or directory\n")


class TestSaving:
    @pytest.fixture
    def saving(self, engine, monkeypatch):
        """Gives the fake model logits to save; `broken` is raised in the middle."""

        def give(broken=None):
            def perplexity(self, text, *, save_logits, **rest):
                save_logits.begin(TOKENS, 7)
                save_logits.add(np.zeros((6, 7), np.float32))
                if broken is not None:
                    raise broken
                return engine.Perplexity()

            monkeypatch.setattr(engine.Model, "perplexity", perplexity)

        return give

    def test_the_size_is_said_and_the_file_written(self, pykv, corpus, tmp_path, saving):
        saving()
        path = tmp_path / "out.kld"
        result = pykv("perplexity", corpus, "--save-all-logits", path)
        assert (result.code, result.out) == (0, "Final estimate: PPL = 12.3457 +/- 0.76543\n")
        # a header of 20 bytes, 16 tokens, 6 rows of two floats and 7 codes and a spare one
        assert f"{path} will take 228 bytes (0.00 GB)\n" in result.err
        assert path.stat().st_size == 20 + 64 + 6 * (8 + 16) == 228
        with LogitsReader(path) as reader:
            assert reader.tokens.tolist() == TOKENS.tolist()

    def test_ctrl_c_leaves_no_file(self, pykv, corpus, tmp_path, saving):
        saving(KeyboardInterrupt())
        result = pykv("perplexity", corpus, "--save-all-logits", tmp_path / "out.kld")
        assert (result.code, os.listdir(tmp_path)) == (130, ["corpus.txt"])

    def test_a_bad_place_ends_it_before_the_model_is_loaded(self, pykv, corpus, tmp_path, saving):
        saving()
        path = tmp_path / "none" / "out.kld"
        result = pykv("perplexity", corpus, "--save-all-logits", path)
        assert (result.code, result.calls) == (2, [])
        assert result.err == f"error: {path}: there is no such folder, create it first\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--kl-divergence"], "no text"),
        (["x", "--kl-divergence-base", "b"], "is what --kl-divergence compares with: give both"),
        (["x", "--save-all-logits", "b", "--kl-divergence"], "without --kl-divergence predicts"),
        (["x", "--kl-divergence", "--chunks", "0"], "chunks must be 1 or more"),
    ],
)
def test_options_that_make_no_sense(pykv, args, said):
    result = pykv("perplexity", *args)
    assert (result.code, result.out, result.calls) == (2, "", [])
    assert said in result.err
    assert result.err.count("\n") == 1


def test_on_the_real_engine(run, reciter, tmp_path):
    text, path = b"Some text, said again and again.\n" * 30, tmp_path / "f16.kld"
    here = ("-m", reciter, "-t", "1", "--deterministic")
    args = ("perplexity", "-", *here, "-c", "128", "--chunks", "3")
    code, _, err = run(*args, "--save-all-logits", path, stdin=text)
    assert code == 0
    assert f"{path} will take {path.stat().st_size:,} bytes" in err
    args = ("perplexity", *here, "--kl-divergence", "--kl-divergence-base", path, "--json")
    code, out, _ = run(*args)
    found = json.loads(out)
    assert (code, found["n_tokens"], found["same_top"]["value"]) == (0, 3 * 63, 1)
    # the same run, but for codes that are off by 1.2e-4 at most
    assert abs(found["kld"]["value"]) < 1.3e-4
    args = ("perplexity", "-", *here, "-c", "128", "--chunks", "3", "--kl-divergence", "--json")
    code, out, _ = run(*args, stdin=text)
    alone = json.loads(out)
    assert (code, alone["kld"]["value"], alone["same_top"]["value"]) == (0, 0, 1)
    assert alone["perplexity"] == found["perplexity"]
