"""Figures are medians of samples taken in turn, and none is given on a red test."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def result(**changes):
    from benchmarks.report import Result

    fields = {"samples": [3.0, 1.0, 8.0], "against": "llama.cpp", "others": [2.0, 4.0, 1.5]}
    return Result("decode", "decode", "smollm2", "tokens/s", **(fields | changes))


def test_the_table_gives_medians_and_their_ratio():
    from benchmarks.report import table

    row = table([result()]).splitlines()[2]
    assert [c.strip() for c in row.split("|")[3:8]] == ["3", "llama.cpp", "2", "1.50", "tokens/s"]
    assert result(others=[], against="").ratio is None


def test_every_sample_is_kept_with_commit_machine_and_command(tmp_path):
    from benchmarks.report import Options, keep

    options = Options(models={"smollm2": Path("/somewhere/model.gguf")})
    kept = keep([result()], options, tmp_path)
    assert keep([result(samples=[5.0])], options, tmp_path) == kept
    first, second = [json.loads(line) for line in kept.read_text().splitlines()]
    assert first["samples"] == [3.0, 1.0, 8.0]
    assert first["others"] == [2.0, 4.0, 1.5]
    assert first["median"] == statistics.median(first["samples"])
    assert first["file"] == "model.gguf"
    assert second["n"] == 1
    assert {"commit", "cpu", "threads", "versions", "time", "command"} <= first.keys()
    assert first["command"].startswith("python -m benchmarks.")


def test_both_sides_take_turns_and_the_first_round_is_dropped(monkeypatch):
    from benchmarks import speed

    monkeypatch.setattr(speed, "PAUSE_S", 0)
    calls = []

    def side(name):
        calls.append(name)
        return float(len(calls))

    ours, theirs = speed.alternate(2, lambda: side("ours"), lambda: side("theirs"))
    assert calls == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]
    assert (ours, theirs) == ([3.0, 6.0], [4.0, 5.0])


def test_memory_of_the_model_file_and_anonymous_memory_are_told_apart():
    from benchmarks.process import _resident

    smaps = (
        "7f0000000000-7f0000001000 r--s 00000000 08:01 1    /m/model.gguf\n"
        "Rss:                 100 kB\nAnonymous:             0 kB\n"
        "7f0000002000-7f0000003000 r-xp 00000000 08:01 2    /lib/other.so\n"
        "Rss:                  20 kB\nAnonymous:             4 kB\n"
        "7f0000004000-7f0000005000 rw-p 00000000 00:00 0 \n"
        "Rss:                   7 kB\nAnonymous:             7 kB\n"
    )
    assert _resident(smaps, Path("/m/model.gguf")) == (11 * 1024, 27 * 1024)


def test_a_red_test_or_none_is_a_reason_to_measure_nothing(tmp_path, monkeypatch):
    from benchmarks import verify

    monkeypatch.setattr(verify, "ROOT", tmp_path)
    (tmp_path / "test_green.py").write_text("def test_it():\n    assert 1 + 1 == 2\n")
    (tmp_path / "test_red.py").write_text("def test_it():\n    assert 1 + 1 == 3\n")
    (tmp_path / "test_none.py").write_text("")
    assert verify.red(["test_green.py"]) is None
    assert "failed" in verify.red(["test_green.py", "test_red.py"])
    assert "no test" in verify.red(["test_none.py"])
    assert "does not exist" in verify.red(["test_gone.py"])


def test_a_red_test_stops_before_anything_is_measured(monkeypatch, capsys):
    from benchmarks import run, verify

    monkeypatch.setattr(run, "options_of", lambda args: None)
    monkeypatch.setattr(run, "measure", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr(verify, "red", lambda paths: "tests/models failed")
    assert verify.main(["decode"]) == 1
    assert capsys.readouterr().err == "nothing is measured: tests/models failed\n"


def test_every_benchmark_names_tests_that_exist():
    from benchmarks.registry import BENCHMARKS

    for entry in BENCHMARKS.values():
        assert entry.tests
        assert all((ROOT / path).exists() for path in entry.tests)
        assert entry.what.endswith(".")
