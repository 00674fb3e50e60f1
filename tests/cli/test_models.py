import json

import pytest

from pykv.engine import hub


@pytest.fixture
def folder(tmp_path, pykv):
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    return folder


def test_names_of_the_catalogue(pykv):
    result = pykv("models")
    assert (result.code, result.err) == (0, "")
    rows = {line.split()[0]: line for line in result.out.splitlines()[1:]}
    assert set(rows) == {entry.name for entry in hub.CATALOG}
    assert all("  no  " in row for row in rows.values())


def test_what_is_here(pykv, folder):
    entry = hub.CATALOG[0]
    (folder / entry.file).write_bytes(b"not the model")
    (folder / "mine.gguf").write_bytes(b"abc")
    found = {m["name"]: m for m in json.loads(pykv("models", "--json").out)["models"]}
    assert found["mine.gguf"]["bytes"] == 3
    assert found[entry.name]["path"] == str(folder / entry.file)
    assert [m["name"] for m in found.values() if m["default"]] == [hub.DEFAULT_MODEL]
    checked = {m["name"]: m for m in json.loads(pykv("models", "--verify", "--json").out)["models"]}
    assert checked[entry.name]["checksum"] == "wrong"
    assert "yes, checksum wrong" in pykv("models", "--verify").out
