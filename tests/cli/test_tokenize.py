import json

import pytest


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch, pykv):
    """Any file will do for the fake tokenizer, whose ids are bytes; 1 is BOS, 2 a control."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    monkeypatch.setenv("PYKV_MODEL", str(file))
    return file


def test_a_line_per_token(pykv):
    result = pykv("tokenize", "a\n")
    assert (result.code, result.out) == (0, "     1  '\\x01'\n    97  'a'\n    10  '\\n'\n")


def test_ids(pykv):
    assert pykv("tokenize", "ab", "--ids").out == "[1, 97, 98]\n"
    assert pykv("tokenize", "ab", "--ids", "--no-bos").out == "[97, 98]\n"
    assert pykv("tokenize", "ab", "--ids", "--parse-special").out == "[1, 2, 97, 98]\n"
    assert pykv("tokenize", "-p", "", "--ids").out == "[1]\n"


def test_bytes_pass_untouched(pykv, tmp_path):
    data = b"\x00\xff\r\n"
    file = tmp_path / "text"
    file.write_bytes(data)
    for result in (
        pykv("tokenize", "--no-bos", "--ids", stdin=data),
        pykv("tokenize", "--no-bos", "--ids", "-f", file),
        pykv("tokenize", "--no-bos", "--ids", "\x00\udcff\r"),
    ):
        assert result.out == "[0, 255, 13]\n"


def test_json(pykv, model):
    assert json.loads(pykv("tokenize", "\udcff", "--json").out) == {
        "model": str(model),
        "tokens": [
            {"id": 1, "text": "\x01", "bytes": "01"},
            {"id": 255, "text": "\ufffd", "bytes": "ff"},
        ],
    }
