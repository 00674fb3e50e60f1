"""Benchmarks of caches: what they run is the real thing, and a bar that is missed is marked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def attended(query, keys, values):
    """Attention of one head in float64."""
    scores = keys @ query
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


@pytest.mark.parametrize("label", ["f16", "q8_0"])
def test_the_kernel_benchmark_attends_to_every_token(label):
    """Two chunks of pages; encoded ones, a partly filled tail, sinks and the new token."""
    from benchmarks.cache_kernel import Attention
    from pykv.formats.coded import find

    n, width = 700, 128
    attention = Attention(label, n, 2)
    attention.seconds()
    out, encoded = attention.out.array.reshape(-1, width).copy(), attention.encoded
    query, *new = (x.array[0].astype(np.float64) for x in attention.inputs)
    attention.close()
    x = np.random.default_rng(0).standard_normal((64, width)).astype(np.float32)
    format_, exact = find(label), x.astype(np.float16)
    assert encoded == (0 if label == "f16" else 10)
    pages = (
        format_.decode_keys(format_.encode_keys(x), width, 64),
        format_.decode_values(format_.encode_values(x), width, 64),
    )
    held = []
    for page in pages:
        tail = np.concatenate([exact] * 11)[: n - 4 - encoded * 64]
        held.append(np.concatenate([exact[:4], *[page] * encoded, tail]).astype(np.float64))
    for head in range(32):
        keys, values = (
            np.vstack([h, fresh[head // 4].astype(np.float16)])
            for h, fresh in zip(held, new, strict=True)
        )
        np.testing.assert_allclose(out[head], attended(query[head], keys, values), atol=1e-5)


def test_bytes_of_a_store_are_those_of_a_model_that_read_the_tokens():
    from benchmarks.cache_quality import _bytes
    from benchmarks.caches import cache_of
    from pykv.backends.base import PAGE, LayerShape

    shape, n = LayerShape(8, 2, 64, 64), 4 + 1024
    f16 = _bytes([shape], cache_of("f16"), n)
    # keys and values of 2 heads: 16 pages and 16 slots of sinks; 8 bytes a table entry
    tables = f16 - 2 * 2 * (16 * PAGE + 16) * 64 * 2
    assert 2 * 2 * 17 * 8 <= tables <= 2 * 2 * 64 * 8
    # q8_0 has 34 bytes for 32 values, and no tail at this length
    q8_0 = 2 * 2 * (16 * PAGE * 64 // 32 * 34 + 16 * 64 * 2)
    assert _bytes([shape], cache_of("q8_0"), n) - tables == q8_0


def test_keys_and_values_may_have_other_types():
    from benchmarks.caches import cache_of, with_base

    assert (cache_of("q4_0").type_k, cache_of("q4_0").type_v) == ("q4_0", "q4_0")
    mixed = cache_of("kivi4/kivi2", position="read")
    assert (mixed.type_k, mixed.type_v, mixed.position) == ("kivi4", "kivi2", "read")
    assert list(with_base(["q8_0", "f16"])) == ["f16", "q8_0"]


def test_three_sides_take_turns(monkeypatch):
    from benchmarks import speed

    monkeypatch.setattr(speed, "PAUSE_S", 0)
    calls = []

    def side(name):
        calls.append(name)
        return float(len(calls))

    samples = speed.in_turn(2, {n: lambda n=n: side(n) for n in "abc"})
    assert "".join(calls) == "cbaabccba"
    assert samples == {"a": [4.0, 9.0], "b": [5.0, 8.0], "c": [6.0, 7.0]}


def test_a_missed_bar_is_marked():
    from benchmarks.report import Bar, Result, table

    def row(bar, samples=(2.0,), others=(1.0,)):
        return Result("x", "x", "m", "u", list(samples), "y", list(others), bar=bar)

    assert row(Bar("≥", 2.0)).met
    assert row(Bar(">", 2.0)).met is False
    assert row(Bar("≤", 1.9)).met is False
    assert row(Bar("≤", 2.0, "median"), others=(9.0,)).met
    assert row(None).met is None
    lines = table([row(Bar(">", 2.0)), row(Bar("≥", 2.0)), row(None)]).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["> 2 **missed**", "≥ 2", ""]
    assert "bar" not in table([row(None)])


def test_bars_are_of_one_size_only():
    from benchmarks import bars

    assert bars.perplexity("smollm2", (16, 512), "q4_0").limit == pytest.approx(1.006)
    assert bars.perplexity("smollm2", (4, 2048), "q4_0").limit == pytest.approx(1.015)
    assert bars.perplexity("smollm2", (2, 320), "q4_0") is None
    assert str(bars.at_most(bars.KLD, "smollm2", 512, "q4_0", of="median")) == "median ≤ 0.006"
    assert bars.at_least(bars.DECODE_PEER, "smollm2", 256, "q4_0") is None
    assert bars.beside_f16(4096, "q4_0").sign == ">"
    assert bars.beside_f16(8000, "kivi2").sign == "≥"
    assert bars.beside_f16(320, "q4_0") is None


def test_llama_cpps_ratio_is_over_its_own_f16_with_rotation(shared_data):
    import json

    from benchmarks.cache_quality import GGML, REFERENCE_MODELS, _their_ratio

    reference = json.loads((shared_data / "reference.json").read_text())["llama.cpp"]
    assert _their_ratio(reference, "smollm2", "q4_0") == pytest.approx(24.5505 / 23.6496)
    assert _their_ratio(reference, "smollm2", "kivi2") is None
    assert _their_ratio({}, "smollm2", "q4_0") is None
    for name in REFERENCE_MODELS:
        assert all(_their_ratio(reference, name, label) for label in GGML)


def test_the_pieces_of_a_run():
    from benchmarks.run import parser

    words = ["cache-quality", "--types", "q4_0,kivi4/kivi2", "--passes", "16x512,4x2048"]
    args = parser().parse_args([*words, "--tokens", "512, 4096"])
    assert args.types == ("q4_0", "kivi4/kivi2")
    assert args.passes == ((16, 512), (4, 2048))
    assert args.tokens == (512, 4096)


@pytest.mark.parametrize("words", [["--passes", "16"], ["--tokens", "0"], ["--model", "other"]])
def test_a_piece_that_makes_no_sense_is_refused(words):
    from benchmarks.run import parser

    with pytest.raises(SystemExit):
        parser().parse_args(["cache-decode", *words])


def test_llama_cpps_caches_are_kept_for_their_own_tokens_only(tmp_path, monkeypatch):
    from benchmarks import cache_speed
    from benchmarks.report import Options
    from pykv.engine import hub

    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x")
    options = Options(models={"smollm2": model})
    names = {
        cache_speed._state(options, "smollm2", label, ids)
        for label in ("q4_0", "q8_0/q4_0")
        for ids in ([1, 2], [1, 3])
    }
    assert len(names) == 4
    assert {n.parent for n in names} == {tmp_path / "benchmarks"}


def test_llama_cpp_holds_what_was_asked_for(tmp_path, monkeypatch):
    from benchmarks import cache_speed
    from benchmarks.report import Options

    monkeypatch.setattr(cache_speed, "_state", lambda *args: tmp_path / "a.state")
    read = []
    peer = SimpleNamespace(
        read=read.extend,
        save=lambda file: file.write_bytes(b""),
        restore=lambda file: None,
        length=600,
    )
    ids = list(range(600))
    cache_speed._fill(Options(), "smollm2", "q4_0", peer, ids)
    assert read == ids
    cache_speed._fill(Options(), "smollm2", "q4_0", peer, ids)  # restored this time
    assert read == ids
    peer.length = 10
    with pytest.raises(RuntimeError, match="holds 10 tokens, not 600"):
        cache_speed._fill(Options(), "smollm2", "q4_0", peer, ids)


def test_results_are_kept_as_they_come(monkeypatch):
    from benchmarks import run
    from benchmarks.report import Options, Result

    kept = []
    monkeypatch.setattr(run, "machine", lambda: {"commit": "c"})
    monkeypatch.setattr(run, "keep", lambda results, options, about: kept.append(about) or "file")

    def broken(options):
        yield Result("x", "x", "m", "u", [1.0])
        raise SystemExit("stopped")

    monkeypatch.setitem(run.BENCHMARKS, "x", SimpleNamespace(run=broken))
    with pytest.raises(SystemExit):
        run.measure(["x"], Options())
    assert kept == [{"commit": "c"}]
