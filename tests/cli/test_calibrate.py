"""The command, with the real engine and a small model."""

import json
from pathlib import Path

import pytest

from pykv.cli import app
from pykv.engine import calibration
from pykv.gguf import open_gguf

TEXT = "The theory of an ancient anthem: the band and the hand, then another land. " * 20


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture
def calibrate(monkeypatch, tmp_path, capsys, reciter):
    """Runs the command in this process, its kernels in the usual folder; files go to a new one."""
    monkeypatch.delenv("PYKV_MODEL", raising=False)
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path / "calibration")

    def run(*args):
        code = app.run(["calibrate", reciter, "-t", "1", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_file_for_each_type(calibrate, corpus, tmp_path):
    code, out, err = calibrate(
        "-f", corpus, "--types", "nuq4,fp8_e4m3", "-c", "128", "--chunks", "2"
    )
    assert code == 0
    assert "[2/2]" in err
    assert "256 tokens are few" in err
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["type", "file"]
    assert [name for name, _ in lines[1:]] == ["nuq4", "fp8_e4m3"]
    for name, path in lines[1:]:
        assert Path(path).parent == tmp_path / "calibration"
        with open_gguf(path) as file:
            assert file.get_str("pykv.calibration.type") == name
            assert file.get_int("pykv.calibration.tokens") == 256


def test_json(calibrate, corpus):
    code, out, _ = calibrate("-f", corpus, "--types", "lowrank", "-c", "128", "--json", "-q")
    found = json.loads(out)
    assert code == 0
    (file,) = found["files"]
    assert file["type"] == "lowrank"
    assert file["tokens"] % 128 == 0
    assert Path(file["path"]).is_file()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "no text: give a file with -f"),
        (["--chunks", "0"], "chunks must be 1 or more, or -1 for all, not 0"),
        (["--types", "q8_0"], "cache type q8_0 needs no calibration"),
        (["--types", "nuq9"], "unknown type 'nuq9' to calibrate"),
        (["-c", "510", "--types", "nuq4", "-f", "short"], "and a chunk has 510"),
        (["-c", "50"], "a chunk needs at least 68 tokens"),
        (["-c", "128", "--device", "reference"], "runs on the cpu backend"),
    ],
)
def test_refusals_are_one_line(calibrate, corpus, tmp_path, args, sentence):
    (tmp_path / "short").write_text("abc")
    args = [str(tmp_path / a) if a == "short" else a for a in args]
    file = [] if not args or "-f" in args else ["-f", corpus]
    code, out, err = calibrate(*args, *file)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert sentence in last
    assert not (tmp_path / "calibration").exists()
