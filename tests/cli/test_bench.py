import csv
import io
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from pykv.engine import bench
from pykv.engine.bench import Figures


@pytest.fixture
def model(small, tmp_path):
    return str(small.write_model(tmp_path / "tiny.gguf"))


@pytest.fixture
def measured(engine, monkeypatch):
    """Figures by rule in the place of measured ones; the list holds what was asked for."""
    asked, load = [], engine.load

    def loaded(model=None, **settings):
        opened = load(model, **settings)
        opened.config, opened.ubatch = settings["cache"], 512
        opened.dev, opened.facts = SimpleNamespace(name="fake"), lambda: {"threads": 2}
        return opened

    def measure(model, wanted, repetitions, step_bytes):
        asked.append((model.config.type_k, model.config.type_v, repetitions))
        for case in wanted:
            if case.n_depth == 13:
                raise KeyboardInterrupt
            step = step_bytes + 1024 if case.n_gen else None
            start = datetime(2026, 1, 2, tzinfo=UTC)
            yield Figures(case, start, (10**9, 2 * 10**9)[:repetitions], 3 << 19, step)

    monkeypatch.setattr(engine, "load", loaded)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads: 1e6 * threads)
    return asked


def test_the_table(pykv, measured, model):
    result = pykv("bench", model, "-d", "0,64", "-p", "100", "-n", "50")
    size, step = 372.75, 307.25 + 1
    file = bench.subject(model)
    assert (file.weight_bytes, file.step_bytes) == (size * 1024, (step - 1) * 1024)
    # 308.25 KiB at 2 MB/s are 158 ms, of the 30 ms a token
    assert (result.code, result.out.splitlines()) == (0, [
        "read bandwidth: 0.0 GB/s on 2 threads",
        "",
        "| model |       size | threads | type_k | type_v | test        |              t/s |"
        "      cache |  read/step | roofline |",
        "| ----- | ---------: | ------: | ------ | ------ | ----------- | ---------------: |"
        " ---------: | ---------: | -------: |",
        "| tiny  | 372.75 KiB |       2 | f16    | f16    | pp100       |    75.00 ± 35.36 |"
        "   1.50 MiB |          - |        - |",
        "| tiny  | 372.75 KiB |       2 | f16    | f16    | tg50        |    37.50 ± 17.68 |"
        "   1.50 MiB | 308.25 KiB |     526% |",
        "| tiny  | 372.75 KiB |       2 | f16    | f16    | pp100 @ d64 |    75.00 ± 35.36 |"
        "   1.50 MiB |          - |        - |",
        "| tiny  | 372.75 KiB |       2 | f16    | f16    | tg50 @ d64  |    37.50 ± 17.68 |"
        "   1.50 MiB | 308.25 KiB |     526% |",
    ])  # fmt: skip


def test_what_the_engine_gets(pykv, measured, model):
    call = pykv("bench", "-m", model, "-r", "2", "-t", "3", "-p", "30", "-n", "8").calls[-1]
    assert (call["model"], call["load"].ctx_size, call["load"].threads) == (model, 30, 3)
    assert measured == [("f16", "f16", 2)]
    assert pykv("bench", model, "-c", "400", "-p", "8", "-n", "8").calls[-1]["load"].ctx_size == 400
    # llama-bench's defaults
    assert pykv("bench", model).calls[-1]["load"].ctx_size == 512
    assert measured[-1] == ("f16", "f16", 5)


def test_cache_types_are_crossed_and_each_is_loaded_before_any_is_measured(
    pykv, engine, measured, model, monkeypatch
):
    events, measure = [], bench.measure
    monkeypatch.setattr(
        bench, "measure", lambda m, *rest: events.append("measured") or measure(m, *rest)
    )
    load = engine.load

    def loaded(*args, **settings):
        events.append((settings["cache"].type_k, settings["cache"].type_v))
        assert settings["cache"].sinks == 9
        return load(*args, **settings)

    monkeypatch.setattr(engine, "load", loaded)
    args = ("-ctk", "f16,q8_0,q8_0", "-ctv", "f32, f16,bf16", "--kv-sinks", "9", "-r", "1")
    assert pykv("bench", model, *args, "-p", "0", "-n", "4").code == 0
    pairs = [(k, v) for k in ("f16", "q8_0") for v in ("f32", "f16", "bf16")]
    assert measured == [(k, v, 1) for k, v in pairs]
    first = events.index("measured") - 1
    assert events[:first] == [("f16", "f32"), ("q8_0", "f16"), ("f16", "bf16")]
    assert events[first::2] == pairs


def test_csv_and_json_hold_the_same(pykv, measured, small, tmp_path):
    model = str(small.write_model(tmp_path / 'a, "b".gguf'))
    args = ("bench", model, "-ctk", "f16,f32", "-p", "100", "-n", "50", "-r", "2")
    rows = list(csv.DictReader(io.StringIO(pykv(*args, "-o", "csv").out)))
    found = json.loads(pykv(*args, "-o", "json").out)
    assert [(r["type_k"], r["n_prompt"], r["n_gen"]) for r in rows] == [
        ("f16", "100", "0"), ("f16", "0", "50"), ("f32", "100", "0"), ("f32", "0", "50"),
    ]  # fmt: skip
    for row, record in zip(rows, found, strict=True):
        assert record.pop("samples_ns") == [10**9, 2 * 10**9]
        assert len(record.pop("samples_ts")) == 2
        assert row == {k: "" if v is None else str(v) for k, v in record.items()}
    assert (found[1]["model_filename"], found[1]["roofline"]) == (model, pytest.approx(5.2608))
    assert pykv(*args, "--json").out == pykv(*args, "-o", "json").out


@pytest.mark.parametrize("form", ["md", "csv", "json"])
def test_an_interrupt_leaves_the_rows_that_are_ready(pykv, measured, model, form):
    args = ("bench", model, "-d", "0,13", "-p", "100", "-n", "50")
    result = pykv(*args, "-o", form)
    whole = pykv("bench", model, "-p", "100", "-n", "50", "-o", form)
    assert (result.code, whole.code, result.err) == (130, 0, whole.err)
    if form == "md":  # of another width
        assert [" ".join(line.split()) for line in result.out.splitlines()[4:]] == [
            " ".join(line.split()) for line in whole.out.splitlines()[4:]
        ]
    else:
        assert result.out == whole.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", "1,x"], "-p must be whole numbers of 0 or more with commas between them, not '1,x"),
        (["-n", ""], "-n must be whole numbers"),
        (["-n", "1,-5"], "-n must be whole numbers of 0 or more"),
        (["-d", "9" * 5000], "-d must be whole numbers"),
        (["-p", "\u0663"], "-p must be whole numbers"),
        (["-r", "0"], "repetitions must be 1 or more, not 0"),
        (["-p", "0", "-n", "0"], "nothing is to be measured"),
        (["-ctk", "f16,"], "-ctk must be cache types with commas between them, not 'f16,'"),
        (["-ctv", "f16,q9"], "unknown cache type 'q9': it is one of "),
        (["-o", "xml"], "unknown output format 'xml': it is one of md, json, csv"),
        (["-o", "csv", "--json"], "--json and -o csv contradict each other: give one"),
        (
            ["-d", "100,450", "-p", "63", "-n", "62"],
            "pp63 @ d450 needs 513 tokens, and the model was trained",
        ),
        (["-c", "99", "-p", "100", "-n", "8"], "pp100 needs 100 tokens, and the context has 99"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(pykv, measured, model, args, message):
    before = len(pykv("inspect", model).calls)
    result = pykv("bench", model, *args)
    assert (result.code, result.out, measured) == (2, "", [])
    assert result.err.startswith(f"error: {message}")
    assert (result.err.count("\n"), len(result.calls)) == (1, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no such signal to one process")
def test_ctrl_c_on_the_real_engine(start, reciter):
    args = ("bench", reciter, "-p", "8", "-n", "500", "-r", "300", "-t", "1", "-q")
    process = start(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    head = [process.stdout.readline() for _ in range(5)]
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert b" pp8 " in head[-1]
    assert (process.returncode, rest, err) == (130, b"", b"")


def test_on_the_real_engine(run, reciter):
    args = ("-p", "40", "-n", "10", "-d", "0,100", "-r", "2", "-t", "1", "-ctk", "f16,f32")
    code, out, err = run("bench", reciter, *args, "-o", "json", "-q")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(r["type_k"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in found] == [
        (k, p, n, d) for k in ("f16", "f32") for d in (0, 100) for p, n in ((40, 0), (0, 10))
    ]
    for record in found:
        tokens = record["n_prompt"] + record["n_gen"]
        assert record["avg_ns"] > 0
        for rate, ns in zip(record["samples_ts"], record["samples_ns"], strict=True):
            assert rate == tokens * 1e9 / ns
    # two layers of two KV heads of 16 channels, for values padded to 32: 384 bytes a token in f16,
    # and tables of 2 x 2 x 2 x 16 addresses; 4 sinks in 16 slots, the rest in pages of 64
    for record, pages in zip(found[:4], (1, 1, 3, 2), strict=True):
        assert record["cache_bytes"] == (16 + pages * 64) * 384 + 1024
    assert all(r["cache_bytes"] > f["cache_bytes"] for f, r in zip(found, found[4:], strict=False))
