import json

import gguf
import numpy as np
import pytest

from pykv.engine import inspect

CACHE = [
    {"type": "f16", "bits_per_value": 16.0, "key_bytes": 64.0, "value_bytes": 32.0, "bytes": 96.0}
]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "_cache", lambda shape: CACHE)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "a\x1b[31m\nname " + "x" * 200)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(1000)])
    writer.add_uint32("llama.block_count", 2)
    writer.add_tensor("w", np.ones((20, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tables(pykv, model):
    result = pykv("inspect", model)
    assert (result.code, result.err) == (0, "")
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0] == f"{model} (GGUF version 3)"
    assert "tokenizer.ggml.tokens [token0, token1, token2, token3, ...] (1,000 values)" in lines
    assert "f32 1 1,280 5,120" in lines
    assert "total 1 1,280 5,120" in lines
    assert "layers 2" in lines
    assert "f16 16.0 64.0 32.0 96.0" in lines
    assert max(map(len, result.out.splitlines())) < 130


def test_a_terminal_gets_no_control_characters(pykv, model):
    assert "\x1b" not in pykv("inspect", model, tty=True).out
    assert "\x1b" in pykv("inspect", model).out


def test_json(pykv, model):
    for args in ([model], ["-m", model]):
        found = json.loads(pykv("inspect", *args, "--json").out)
        assert found["metadata"]["tokenizer.ggml.tokens"]["length"] == 1000
        assert found["tensors"]["bytes"] == 5120
        assert found["cache"] == CACHE


@pytest.mark.parametrize("data", [None, b"", b"GGUF", b"no model at all"])
def test_a_bad_file_is_one_line(pykv, tmp_path, data):
    path = tmp_path / "bad.gguf"
    if data is not None:
        path.write_bytes(data)
    result = pykv("inspect", path)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert "bad.gguf" in result.err
    assert result.err.count("\n") == 1
