"""What is written, read back by the gguf package and by our own reader."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pykv.errors import GGUFError
from pykv.gguf import open_gguf
from pykv.gguf.writer import write_gguf

METADATA = {
    "general.architecture": "tést",
    "small": 7,
    "minus": -7,
    "large": 2**40,
    "least": -(2**40),
    "half": 0.1,
    "yes": True,
    "double": np.float64(0.1),
    "byte": np.uint8(200),
    "numbers": np.array([1, -2, 3], np.int16),
    "flags": np.array([True, False]),
    "words": ["a", "", "é", b"\xff\x00"],
    "nothing": np.empty(0, np.float32),
}
TYPES = {
    "small": "UINT32", "minus": "INT32", "large": "UINT64", "least": "INT64", "half": "FLOAT32",
    "yes": "BOOL", "double": "FLOAT64", "byte": "UINT8",
}  # fmt: skip


def tensors():
    rng = np.random.default_rng(0)
    return {
        "vector": rng.standard_normal(5).astype(np.float32),
        "matrix": rng.standard_normal((3, 7)).astype(np.float16),
        "deep": rng.standard_normal((2, 3, 4, 5)).astype(np.float32),
        "strided": rng.standard_normal((6, 4)).astype(np.float32).T,
        "big-endian": rng.standard_normal(3).astype(">f4"),
    }


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "made.gguf"
    write_gguf(path, METADATA, tensors())
    assert [p.name for p in tmp_path.iterdir()] == ["made.gguf"]
    return path


def test_the_gguf_package_reads_the_same_back(written):
    reader = gguf.GGUFReader(written)
    assert {t.name for t in reader.tensors} == set(tensors())
    for tensor in reader.tensors:
        np.testing.assert_array_equal(tensor.data.reshape(tensors()[tensor.name].shape),
                                      tensors()[tensor.name])  # fmt: skip
    for key, kind in TYPES.items():
        field = reader.fields[key]
        assert field.types == [gguf.GGUFValueType[kind]]
        assert field.contents() == pytest.approx(METADATA[key], rel=1e-7)
    assert reader.fields["general.architecture"].contents() == "tést"
    assert reader.fields["numbers"].contents() == [1, -2, 3]
    assert reader.fields["words"].types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]
    assert reader.data_offset % 32 == 0


def test_our_reader_reads_the_same_back(written):
    with open_gguf(written) as file:
        for key, value in METADATA.items():
            found = file.metadata[key]
            if isinstance(value, np.ndarray):
                assert found.dtype == value.dtype
                np.testing.assert_array_equal(found, value)
            elif key == "words":
                assert found == [b"a", b"", "é".encode(), b"\xff\x00"]
            else:
                assert found == pytest.approx(value, rel=1e-7) if key == "half" else found == value
        for name, tensor in tensors().items():
            mine = file.require(name, tensor.shape)
            kind = {"f32": "<f4", "f16": "<f2"}[mine.type]
            np.testing.assert_array_equal(mine.data.view(kind).reshape(tensor.shape), tensor)


def test_an_alignment_of_its_own(tmp_path):
    write_gguf(tmp_path / "a.gguf", {"general.alignment": 256}, tensors())
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert all(t.data_offset % 256 == 0 for t in reader.tensors)
    np.testing.assert_array_equal(reader.tensors[0].data, tensors()["vector"])


@pytest.mark.parametrize(
    ("metadata", "made", "sentence"),
    [
        ({"": 1}, {}, "a metadata key has an empty name"),
        ({"k": 2**70}, {}, "metadata key k is 1180591620717411303424, expected text"),
        ({"k": None}, {}, "metadata key k is None, expected text"),
        ({"k": np.zeros((2, 2))}, {}, "an array of float64 with 2 axes"),
        ({"k": np.zeros(2, np.float16)}, {}, "an array of float16"),
        ({}, {"t" * 64: np.zeros(1, np.float32)}, "a name of 64 bytes, expected 1 to 63"),
        ({}, {"": np.zeros(1, np.float32)}, "a name of 0 bytes"),
        ({}, {"t": np.zeros(1)}, "tensor t has type float64, expected float32 or float16"),
        ({}, {"t": np.zeros((1,) * 5, np.float32)}, r"tensor t has shape \[1, 1, 1, 1, 1\]"),
        ({}, {"t": np.zeros((3, 0), np.float32)}, r"tensor t has shape \[3, 0\]"),
    ],
)
def test_what_gguf_cannot_hold_is_refused(tmp_path, metadata, made, sentence):
    target = tmp_path / "bad.gguf"
    target.write_bytes(b"old")
    with pytest.raises(GGUFError, match=f"^bad.gguf: .*{sentence}"):
        write_gguf(target, metadata, made)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "made.gguf"
    target.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pykv.gguf.writer._fill", full)
    with pytest.raises(OSError, match="No space"):
        write_gguf(target, {}, tensors())
    assert [p.name for p in tmp_path.iterdir()] == ["made.gguf"]
    assert target.read_bytes() == b"old"
