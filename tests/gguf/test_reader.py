"""Opening files: against the `gguf` package, in shards, and giving the map back."""

from __future__ import annotations

import gc
import os
import struct
import time
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from pykv.errors import GGUFError
from pykv.gguf import open_gguf

KINDS = gguf.GGUFValueType


def same(ours, theirs) -> bool:
    """Equal values; gguf-py gives lists for arrays and UTF-8 text for their strings."""
    if isinstance(ours, np.ndarray):
        return ours.tolist() == theirs
    if isinstance(ours, list):
        return ours == [text.encode() for text in theirs]
    return ours == theirs and type(ours) is type(theirs)


def compare(path: Path) -> None:
    """Every key and every tensor's shape, type and bytes equal gguf-py's."""
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        keys = [name for name in theirs.fields if not name.startswith("GGUF.")]
        assert list(ours.metadata) == keys
        for name in keys:
            assert same(ours.metadata[name], theirs.fields[name].contents()), name
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for t in theirs.tensors:
            tensor = ours.tensors[t.name]
            assert tensor.shape == tuple(int(n) for n in reversed(t.shape))
            assert tensor.type == t.tensor_type.name.lower()
            assert tensor.nbytes == tensor.data.nbytes == t.n_bytes
            assert tensor.data.tobytes() == t.data.tobytes()
        assert ours.nbytes == sum(t.n_bytes for t in theirs.tensors)


@pytest.fixture
def written(tmp_path) -> Path:
    """A file by gguf-py's writer: every value type, tensors of several types and ranks."""
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in {
        KINDS.UINT8: 255, KINDS.INT8: -128, KINDS.UINT16: 65535, KINDS.INT16: -32768,
        KINDS.UINT32: 2**32 - 1, KINDS.INT32: -(2**31), KINDS.UINT64: 2**64 - 1,
        KINDS.INT64: -(2**63), KINDS.FLOAT32: 0.5, KINDS.FLOAT64: 1e300, KINDS.BOOL: True,
        KINDS.STRING: "ünï\0code",
    }.items():  # fmt: skip
        writer.add_key_value(f"one.{kind.name}", value, kind)
        many = [value] * 3
        writer.add_key_value(f"many.{kind.name}", many, KINDS.ARRAY, sub_type=kind)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 64)).astype("f4")
    writer.add_tensor("rank1", x[0, 0])
    writer.add_tensor("rank2", x[0].astype("f2"))
    for kind in gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0:
        writer.add_tensor(f"rank3.{kind.name}", gguf.quantize(x, kind), raw_dtype=kind)
    writer.add_tensor("i32", np.arange(6, dtype="i4").reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_equals_gguf_py(written):
    compare(written)


def test_version_2_reads_as_version_3(written, forge, tmp_path):
    raw = bytearray(written.read_bytes())
    raw[4:8] = struct.pack("<I", 2)
    path = tmp_path / "v2.gguf"
    path.write_bytes(raw)
    with open_gguf(path) as file:
        assert file.version == 2
    compare(path)


def test_python_types_of_values(written):
    with open_gguf(written) as file:
        assert file.version == 3
        assert file.metadata["one.BOOL"] is True
        assert file.metadata["one.STRING"] == "ünï\0code"
        assert file.metadata["many.STRING"] == ["ünï\0code".encode()] * 3
        for name, dtype in {"UINT8": "u1", "INT64": "i8", "FLOAT32": "f4", "BOOL": "?"}.items():
            array = file.metadata[f"many.{name}"]
            assert array.dtype == np.dtype(dtype)
            assert not array.flags.writeable


def test_text_that_is_not_utf8_survives(forge, tmp_path):
    path = tmp_path / "m.gguf"
    tokens = forge.array("t", 8, 2, forge.string(b"\xff\x00") + forge.string(b"ok"))
    path.write_bytes(forge.file([forge.key("s", 8, forge.string(b"a\xff")), tokens]))
    with open_gguf(path) as file:
        assert file.metadata["s"].encode("utf-8", "surrogateescape") == b"a\xff"
        assert file.metadata["t"] == [b"\xff\x00", b"ok"]


def test_empty_arrays_keep_their_kind(forge, tmp_path):
    path = tmp_path / "m.gguf"
    keys = [forge.array("s", 8, 0, b""), forge.array("i", 11, 0, b""), forge.array("b", 7, 0, b"")]
    path.write_bytes(forge.file(keys))
    with open_gguf(path) as file:
        assert file.metadata["s"] == []
        assert (file.metadata["i"].dtype, file.metadata["i"].shape) == (np.dtype("i8"), (0,))
        assert (file.metadata["b"].dtype, file.metadata["b"].shape) == (np.dtype("?"), (0,))


def test_any_byte_but_zero_is_true(forge, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(
        forge.file([forge.key("b", 7, b"\x02"), forge.array("bs", 7, 3, b"\x00\x01\x80")])
    )
    with open_gguf(path) as file:
        assert file.metadata["b"] is True
        assert file.metadata["bs"].tolist() == [False, True, True]


def test_gaps_other_orders_and_alignments_are_read(forge, tmp_path):
    path = tmp_path / "m.gguf"
    data = b"".join(bytes([i]) * 64 for i in range(4))
    infos = [forge.info("late", [16], 24, 192), forge.info("early", [8, 2], 24, 64)]
    path.write_bytes(forge.file([forge.u32("general.alignment", 64)], infos, data, alignment=64))
    with open_gguf(path) as file:
        assert file.tensors["late"].data.tolist() == [3] * 16
        assert file.tensors["early"].data.tolist() == [[1] * 8] * 2


def test_a_scalar_tensor_has_no_dimensions(forge, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(forge.file([], [forge.info("x", [], 0, 0)], struct.pack("<f", 2.5)))
    with open_gguf(path) as file:
        assert file.tensors["x"].shape == ()
        assert file.tensors["x"].data.view("<f4").tolist() == [2.5]


def test_rows_are_a_view(small, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(small)
    with open_gguf(path) as file:
        whole = file.tensors["weight"]
        part = whole.rows(1, 2)
        assert (part.shape, part.nbytes, part.type) == ((1, 64), 36, "q4_0")
        assert part.data.tolist() == [list(range(36, 72))]
        assert np.shares_memory(part.data, whole.data)
        assert not whole.data.flags.writeable
        for start, stop in (0, 3), (-1, 1), (1, 1), (2, 1):
            with pytest.raises(GGUFError, match=r"m.gguf: tensor weight has shape \[2, 64\]"):
                whole.rows(start, stop)
        with pytest.raises(GGUFError, match="expected a matrix"):
            file.tensors["norm"].rows(0, 1)


def test_require_names_what_does_not_fit(small, forge, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(small)
    with open_gguf(path) as file:
        assert file.require("norm", (8,)) is file.tensors["norm"]
        assert file.require("weight").shape == (2, 64)
        with pytest.raises(
            GGUFError, match=r"m.gguf: tensor weight has shape \[2, 64\], expected \[64, 2\]"
        ):
            file.require("weight", (64, 2))
        with pytest.raises(GGUFError, match="m.gguf: tensor bias is missing.*2 tensors"):
            file.require("bias")
    with pytest.raises(GGUFError, match="closed"):
        file.require("norm")
    path.write_bytes(forge.file())
    with open_gguf(path) as file, pytest.raises(GGUFError, match="vocabulary only"):
        file.require("norm")


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="only Linux lists a process's maps in /proc"
)


@needs_proc
def test_close_unmaps_at_once_or_with_the_last_view(small, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(small)
    file = open_gguf(path)
    assert mapped(path)
    file.close()
    file.close()
    assert not mapped(path)

    with open_gguf(path) as file:
        view = file.tensors["weight"].rows(0, 1).data
    assert mapped(path)
    assert view.tolist() == [list(range(36))]
    del view
    gc.collect()
    assert not mapped(path)


@needs_proc
def test_a_refused_file_is_not_kept_mapped(small, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(small[:-1])
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    assert not mapped(path)
    assert "m.gguf" in str(caught.value)  # the error, and its traceback, are alive here


def test_paths_that_hold_no_file(tmp_path, monkeypatch):
    with pytest.raises(GGUFError, match="none.gguf: no such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(GGUFError, match="this is a folder"):
        open_gguf(str(tmp_path))
    with pytest.raises(GGUFError, match="cannot be a file's name"):
        open_gguf("a\0b.gguf")
    path = tmp_path / "locked.gguf"
    path.write_bytes(b"GGUF")

    def refuse(*args, **kwargs):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(GGUFError, match="locked.gguf: the file cannot be read: Permission denied"):
        open_gguf(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="pipe.gguf: this is no regular file"):
        open_gguf(tmp_path / "pipe.gguf")


def shard(forge, no, count, tensors, total=None, extra=()) -> bytes:
    """One shard, whose tensors are 32 bytes each, of the value of their name's last digit."""
    keys = list(extra)
    if no is not None:
        keys.append(forge.key("split.no", 2, struct.pack("<H", no)))
    keys.append(forge.key("split.count", 2, struct.pack("<H", count)))
    if total is not None:
        keys.append(forge.key("split.tensors.count", 5, struct.pack("<i", total)))
    infos = [forge.info(name, [32], 24, 32 * i) for i, name in enumerate(tensors)]
    return forge.file(keys, infos, b"".join(bytes([int(name[-1])]) * 32 for name in tensors))


@pytest.fixture
def shards(forge, tmp_path):
    """Writes `{number: bytes}` under the names of a split; the first is returned."""

    def write(parts, count=3):
        for no, raw in parts.items():
            (tmp_path / f"m-{no:05d}-of-{count:05d}.gguf").write_bytes(raw)
        return tmp_path / f"m-00001-of-{count:05d}.gguf"

    return write


def sound(forge):
    arch = forge.key("general.architecture", 8, forge.string("llama"))
    return {
        1: shard(forge, 0, 3, ["a1"], 4, [arch]),
        2: shard(forge, 1, 3, ["b2", "c3"], 4),
        3: shard(forge, 2, 3, ["d4"], 4),
    }


def test_shards_are_one_model(forge, shards):
    with open_gguf(shards(sound(forge))) as file:
        assert {n: t.data.tolist() for n, t in file.tensors.items()} == {
            f"{letter}{i}": [i] * 32 for i, letter in enumerate("abcd", 1)
        }
        assert file.get_str("general.architecture") == "llama"
        assert file.nbytes == 128
        assert file.tensors["d4"].file == "m-00003-of-00003.gguf"


def test_first_shard_may_hold_no_tensor(forge, shards):
    parts = {1: shard(forge, 0, 2, [], 1), 2: shard(forge, 1, 2, ["a7"], 1)}
    with open_gguf(shards(parts, 2)) as file:
        assert file.tensors["a7"].data.tolist() == [7] * 32


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_file_keeps_its_split_keys(forge, tmp_path, count):
    path = tmp_path / "any name.gguf"
    path.write_bytes(shard(forge, 0, count, ["a1"], 1))
    with open_gguf(path) as file:
        assert list(file.tensors) == ["a1"]


SPLITS = {
    "missing sibling": (lambda f: {3: None}, "00001", ["shard 3 of 3", "m-00003-of-00003.gguf"]),
    "through shard 2": (lambda f: {}, "00002", ["not the first", "open m-00001-of-00003.gguf"]),
    "swapped": (
        lambda f: {2: shard(f, 2, 3, ["b2", "c3"], 4)},
        "00001",
        ["m-00002-of-00003.gguf: ", "split.no is 2", "expected 1"],
    ),
    "first named wrongly": (
        lambda f: {1: shard(f, 1, 3, ["a1"], 4)},
        "00001",
        ["split.no is 1", "not the first"],
    ),
    "no number": (
        lambda f: {2: shard(f, None, 3, ["b2"], 4)},
        "00001",
        ["m-00002-of-00003.gguf: ", "split.no is missing", "expected 1"],
    ),
    "other count": (
        lambda f: {3: shard(f, 2, 4, ["d4"], 4)},
        "00001",
        ["m-00003-of-00003.gguf: ", "split.count is 4", "expected 3"],
    ),
    "count against name": (
        lambda f: {1: shard(f, 0, 4, ["a1"], 4)},
        "00001",
        ["m-00001-of-00003.gguf: ", "split.count is 4", "expected 3"],
    ),
    "total": (
        lambda f: {3: shard(f, 2, 3, ["d4", "e5"], 4)},
        "00001",
        ["5 tensors", "expected 4", "split.tensors.count"],
    ),
    "same tensor": (
        lambda f: {3: shard(f, 2, 3, ["a1"], 4)},
        "00001",
        ["m-00003-of-00003.gguf: tensor a1", "m-00001-of-00003.gguf too"],
    ),
    "damaged sibling": (
        lambda f: {2: b"GGUF"},
        "00001",
        ["m-00002-of-00003.gguf: ", "ends inside the version"],
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_shards_that_do_not_belong_together(name, forge, shards):
    change, start, fragments = SPLITS[name]
    parts = sound(forge) | change(forge)
    first = shards({no: raw for no, raw in parts.items() if raw is not None})
    with pytest.raises(GGUFError) as caught:
        open_gguf(first.with_name(f"m-{start}-of-00003.gguf"))
    assert [f for f in fragments if f not in str(caught.value)] == [], str(caught.value)


def test_a_shard_that_was_renamed(forge, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(shard(forge, 0, 3, ["a1"], 4))
    with pytest.raises(GGUFError, match=r"model.gguf: .* split into 3, .*-00001-of-00003.gguf"):
        open_gguf(path)


@pytest.mark.models
def test_smollm2_equals_gguf_py(smollm2_path):
    compare(smollm2_path)


@pytest.mark.models
def test_gemma_opens_fast_and_holds_what_its_makers_say(gemma_path):
    # gguf-py takes seconds for these 262,144 tokens, so facts stand in for it
    took = []
    for _ in range(3):
        start = time.perf_counter()
        with open_gguf(gemma_path) as file:
            took.append(time.perf_counter() - start)
            types = Counter(t.type for t in file.tensors.values())
            assert types == {"q5_0": 81, "q4_k": 27, "q8_0": 10, "q6_k": 9, "f32": 109}
            assert len(file.metadata["tokenizer.ggml.tokens"]) == 262_144
            assert file.require("token_embd.weight", (262_144, 640)).type == "q8_0"
            assert file.get_int("gemma3.block_count") == 18
    assert min(took) < 0.4
