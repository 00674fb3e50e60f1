"""What inspect reports, against files written with the gguf package, and figures of llama.cpp."""

import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from pykv import registry
from pykv.engine import inspect
from pykv.errors import GGUFError

FORMATS = {
    "f16": SimpleNamespace(roles=("weight", "cache"), bits_per_value=lambda width, side: 16.0),
    "q8_0": SimpleNamespace(
        roles=("weight", "cache"),
        bits_per_value=lambda width, side: {"key": 8.5, "value": 8.75}[side],
    ),
    "q4_k": SimpleNamespace(roles=("weight",)),
}


@pytest.fixture(autouse=True)
def formats(monkeypatch):
    monkeypatch.setattr(registry, "names", lambda folder: sorted(FORMATS))
    monkeypatch.setattr(
        registry, "find", lambda folder, name, what: SimpleNamespace(FORMAT=FORMATS[name])
    )


@pytest.fixture
def write(tmp_path):
    def run(keys, tensors=()):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in keys.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        for name, data, kind in tensors:
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return run


SHAPE = {
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.context_length": 8192,
}


def test_the_cache_of_smollm2_costs_what_llama_cpp_prints(write):
    found = inspect.report(write(SHAPE))
    assert [c["type"] for c in found["cache"]] == ["f16", "q8_0"]
    f16, q8_0 = found["cache"]
    # llama.cpp's log for this shape at a context of 8192: KV buffer size = 180.00 MiB
    assert f16["bytes"] * 8192 == 180 * 2**20
    assert f16["key_bytes"] == f16["value_bytes"] == f16["bytes"] / 2
    assert q8_0["bytes"] == f16["bytes"] / 2 * (8.5 + 8.75) / 16
    assert (found["model"]["layers"], found["model"]["kv_heads"]) == (30, 3)
    assert (found["model"]["key_width"], found["model"]["context"]) == (64, 8192)


def test_own_widths_and_heads_per_layer(write):
    shape = SHAPE | {
        "llama.block_count": 3,
        "llama.attention.head_count_kv": [1, 0, 2],
        "llama.attention.key_length": 192,
        "llama.attention.value_length": 128,
    }
    found = inspect.report(write(shape))
    assert found["cache"][0]["key_bytes"] == 3 * 192 * 2
    assert found["cache"][0]["value_bytes"] == 3 * 128 * 2
    assert found["model"]["kv_heads"] == [1, 0, 2]


def test_without_kv_heads_every_head_has_its_own(write):
    shape = {k: v for k, v in SHAPE.items() if not k.endswith("_kv")}
    assert inspect.report(write(shape))["cache"][0]["bytes"] == 30 * 9 * 64 * 2 * 2


def test_tensors_by_type(write):
    kind = gguf.GGMLQuantizationType.Q8_0
    q8_0 = gguf.quants.quantize(np.ones((4, 64), np.float32), kind)
    path = write(
        {},
        [
            ("a", np.ones((2, 3), np.float32), None),
            ("b", np.ones(5, np.float32), None),
            ("c", q8_0, kind),
        ],
    )
    tensors = inspect.report(path)["tensors"]
    assert tensors["types"] == [
        {"type": "q8_0", "count": 1, "values": 256, "bytes": q8_0.nbytes},
        {"type": "f32", "count": 2, "values": 11, "bytes": 44},
    ]
    assert (tensors["count"], tensors["values"]) == (3, 267)
    assert tensors["bytes"] == 44 + q8_0.nbytes


def test_a_vocabulary_has_no_cache(write):
    found = inspect.report(write({"tokenizer.ggml.tokens": ["a", "b", "c", "d", "e"]}))
    assert found["cache"] == []
    assert found["model"]["vocabulary"] == 5
    assert found["metadata"]["tokenizer.ggml.tokens"] == {
        "length": 5,
        "first": ["a", "b", "c", "d"],
    }


def test_odd_values_survive_json(write):
    found = inspect.report(write({"x.nan": float("nan"), "x.ints": [1, 2], "x.text": "é\x1b"}))
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again == found
    assert again["metadata"]["x.nan"] == "nan"
    assert again["metadata"]["x.ints"] == [1, 2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", "thirty"),
        ("llama.attention.head_count_kv", ["a"]),
        ("llama.attention.head_count_kv", [0.5]),
        ("llama.attention.key_length", 0.5),
    ],
)
def test_a_key_of_another_type_is_named(write, key, value):
    with pytest.raises(GGUFError, match=key):
        inspect.report(write(SHAPE | {key: value}))


def test_absurd_counts_cost_no_memory(write):
    found = inspect.report(write(SHAPE | {"llama.block_count": 2**32 - 1}))
    assert found["cache"][0]["bytes"] == (2**32 - 1) * 3 * 64 * 2 * 2
    assert inspect.report(write(SHAPE | {"llama.attention.head_count": 0}))["cache"] == []
