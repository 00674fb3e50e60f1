import json
from pathlib import Path

import pytest

from pykv.engine import hub


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What hub.resolve was asked for; it hands out a file of three bytes."""
    path = tmp_path / "fetched.gguf"
    path.write_bytes(b"abc")
    calls = []

    def resolve(model, *, offline=False, progress=None):
        calls.append((model, offline))
        progress("fetching", 1, 3)
        return path

    monkeypatch.setattr(hub, "resolve", resolve)
    calls.append(path)
    return calls


def test_the_path_on_stdout_and_the_progress_on_stderr(pykv, asked):
    path = asked.pop()
    result = pykv("pull", "smollm2")
    assert (result.code, result.out, result.err) == (0, f"{path}\n", "fetching\n")
    assert pykv("pull", "--offline").code == 0
    assert pykv("pull", "-hf", "user/repo:Q8_0").code == 0
    assert asked == [("smollm2", False), (None, True), ("hf:user/repo:Q8_0", False)]


def test_json(pykv, asked):
    assert json.loads(pykv("pull", "--json").out) == {"path": str(asked[0]), "bytes": 3}


def test_a_damaged_file_is_fetched_again(pykv, asked, monkeypatch, tmp_path):
    path, pulled = asked[0], []
    entry = hub.CATALOG[0]
    damaged = hub.InstalledModel(entry.name, path, 3, "wrong")
    monkeypatch.setattr(hub, "installed", lambda: [damaged])

    def pull(entry, progress):
        pulled.append(entry)
        return Path("/good.gguf")

    monkeypatch.setattr(hub, "pull", pull)
    result = pykv("pull", "-q")
    assert (result.code, result.out, result.err) == (0, "/good.gguf\n", "")
    assert pulled == [entry]
    result = pykv("pull", "--offline")
    assert (result.code, result.out) == (1, "")
    assert "is damaged, and offline was asked for" in result.err
    assert pulled == [entry]


@pytest.mark.parametrize("name", ["nosuchmodel", "hf:nonsense"])
def test_an_unknown_name_is_one_line(pykv, name):
    result = pykv("pull", name)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
