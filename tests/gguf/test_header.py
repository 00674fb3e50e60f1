"""Damaged files: each ends in one sentence that names what is wrong, and takes no memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv.errors import GGUFError
from pykv.gguf import open_gguf

HUGE = 2**62
# a sentence, a few objects, the parsed keys: far below what any of the false claims asks for
PEAK_BYTES = 200_000


def one(f, dims=(8,), kind=0, offset=0, name="blk.0.w", data=bytes(32)) -> bytes:
    return f.file([], [f.info(name, dims, kind, offset)], data)


def two(f, first, second, data=bytes(128)) -> bytes:
    return f.file([], [f.info(*first), f.info(*second)], data)


def aligned(f, kind: int, payload: bytes) -> bytes:
    return f.file([f.key("general.alignment", kind, payload)])


DAMAGED: dict[str, tuple[Callable, list[str]]] = {
    "empty": (lambda f: b"", ["empty"]),
    "other format": (lambda f: f.file(magic=b"PK\x03\x04"), ["PK\\x03\\x04", "b'GGUF'"]),
    "html": (lambda f: b"<!DOCTYPE html><html>", ["b'<!DO'", "not a GGUF file"]),
    "three bytes": (lambda f: b"GGU", ["b'GGU'"]),
    "magic only": (lambda f: b"GGUF", ["the version", "4 bytes"]),
    "version 0": (lambda f: f.file(version=0), ["version 0", "expected 2 or 3"]),
    "version 1": (lambda f: f.file(version=1), ["version 1", "convert"]),
    "version 4": (lambda f: f.file(version=4), ["version 4", "expected 2 or 3", "newer"]),
    "big-endian": (
        lambda f: b"GGUF" + struct.pack(">Iqq", 3, 0, 0),
        ["big-endian", "little-endian", "convert"],
    ),
    "header cut": (lambda f: f.file()[:20], ["metadata key count", "20 bytes"]),
    "negative tensors": (lambda f: f.file(n_infos=-1), ["tensor count is -1"]),
    "negative keys": (lambda f: f.file(n_keys=-5), ["metadata key count is -5"]),
    "many tensors": (lambda f: f.file(n_infos=HUGE), ["4,611,686,018,427,387,904 tensors"]),
    "many keys": (lambda f: f.file(n_keys=HUGE), ["4,611,686,018,427,387,904 metadata keys"]),
    "one key too many": (lambda f: f.file([f.u32("a.b", 1)], n_keys=2), ["2 metadata keys"]),
    "empty key": (lambda f: f.file([f.u32("", 1)]), ["key 0", "empty name"]),
    "duplicate key": (
        lambda f: f.file([f.u32("a.b", 1), f.u32("a.b", 1)]),
        ["key a.b", "twice"],
    ),
    "endless key": (
        lambda f: f.file([struct.pack("<Q", HUGE) + b"abcdefgh"]),
        ["name of metadata key 0", "4,611,686,018,427,387,904 bytes", "8 bytes are left"],
    ),
    "endless string": (
        lambda f: f.file([f.key("a.b", 8, struct.pack("<Q", 2**64 - 1) + b"ab")]),
        ["key a.b", "18,446,744,073,709,551,615 bytes", "2 bytes are left"],
    ),
    "value type": (lambda f: f.file([f.key("a.b", 13, bytes(8))]), ["key a.b", "value type 13"]),
    "negative value type": (lambda f: f.file([f.key("a.b", -1, b"")]), ["a.b", "value type -1"]),
    "scalar cut": (lambda f: f.file([f.key("a.b", 10, bytes(7))]), ["ends inside", "key a.b"]),
    "array value type": (
        lambda f: f.file([f.array("a.b", 99, 0, b"")]),
        ["key a.b", "value type 99"],
    ),
    "nested array": (
        lambda f: f.file([f.array("a.b", 9, 1, struct.pack("<iQ", 4, 0))]),
        ["key a.b", "array of arrays"],
    ),
    "endless array": (
        lambda f: f.file([f.array("a.b", 4, HUGE, bytes(12))]),
        ["key a.b", "4,611,686,018,427,387,904 uint32", "12 bytes are left"],
    ),
    "array one too long": (
        lambda f: f.file([f.array("a.b", 12, 2, bytes(15))]),
        ["key a.b", "2 float64", "15 bytes are left"],
    ),
    "endless strings": (
        lambda f: f.file([f.array("tokens", 8, HUGE, bytes(80))]),
        ["key tokens", "4,611,686,018,427,387,904 strings"],
    ),
    "string in array": (
        lambda f: f.file([f.array("tokens", 8, 2, f.string("ab") + struct.pack("<Q", HUGE))]),
        ["entry 1 of metadata key tokens", "4,611,686,018,427,387,904 bytes", "0 bytes are left"],
    ),
    "last string in array": (
        lambda f: f.file([f.array("tokens", 8, 1, struct.pack("<Q", 1000) + b"abcde")]),
        ["entry 0 of metadata key tokens", "1,000 bytes", "5 bytes are left"],
    ),
    "strings cut": (
        lambda f: f.file([f.array("tokens", 8, 2, f.string("ab" * 9))]),
        ["ends inside entry 1 of metadata key tokens"],
    ),
    "alignment 0": (lambda f: aligned(f, 4, bytes(4)), ["general.alignment is 0", "power of two"]),
    "alignment 48": (
        lambda f: aligned(f, 4, struct.pack("<I", 48)),
        ["general.alignment is 48", "power of two"],
    ),
    "alignment -32": (
        lambda f: aligned(f, 5, struct.pack("<i", -32)),
        ["general.alignment is -32", "power of two"],
    ),
    "alignment text": (lambda f: aligned(f, 8, f.string("32")), ["general.alignment", "integer"]),
    "alignment bool": (lambda f: aligned(f, 7, b"\1"), ["general.alignment", "integer"]),
    "nameless": (lambda f: one(f, name=""), ["number 0", "0 bytes", "1 to 63"]),
    "long name": (lambda f: one(f, name="x" * 64), ["x" * 64, "64 bytes", "1 to 63"]),
    "duplicate tensor": (
        lambda f: two(f, ("w", [8], 0, 0), ("w", [8], 0, 32)),
        ["tensor w ", "twice"],
    ),
    "five dimensions": (lambda f: one(f, [1] * 5), ["blk.0.w", "5 dimensions", "4 at most"]),
    "negative dimension": (lambda f: one(f, [8, -1]), ["blk.0.w", "[-1, 8]", "1 or more"]),
    "no values": (lambda f: one(f, [0, 8]), ["blk.0.w", "[8, 0]", "1 or more"]),
    "too many values": (lambda f: one(f, [2**32, 2**31]), ["blk.0.w", "2^63"]),
    "wrapping values": (lambda f: one(f, [2**32, 2**32]), ["blk.0.w", "2^63"]),
    "wrapping bytes": (
        lambda f: one(f, [2**31, 2**31 + 1]),
        ["blk.0.w", "18,446,744,082,299,486,304", "cut short"],
    ),
    "unknown type": (lambda f: one(f, kind=97), ["blk.0.w", "type id 97", "newer version"]),
    "negative type": (lambda f: one(f, kind=-1), ["blk.0.w", "type id -1"]),
    "removed q4_2": (lambda f: one(f, kind=4), ["blk.0.w", "q4_2", "requantise", "to q4_0"]),
    "removed q4_0_8_8": (lambda f: one(f, kind=33), ["blk.0.w", "q4_0_8_8", "to q4_0"]),
    "removed iq4_nl_4_4": (lambda f: one(f, kind=36), ["blk.0.w", "iq4_nl_4_4", "to iq4_nl"]),
    "torn row": (
        lambda f: one(f, [40, 32], 2),
        ["blk.0.w", "rows of 40 values", "multiple of 32", "q4_0"],
    ),
    "scalar of blocks": (lambda f: one(f, [], 12), ["blk.0.w", "rows of 1 values", "q4_k"]),
    "offset off the grid": (
        lambda f: one(f, offset=4, data=bytes(64)),
        ["blk.0.w", "offset 4", "multiple of the alignment 32"],
    ),
    "wrapping offset": (lambda f: one(f, offset=2**64 - 32), ["blk.0.w", "cut short"]),
    "data cut": (lambda f: one(f, data=bytes(31)), ["blk.0.w", "bytes 64 to 96", "95 bytes"]),
    "overlap": (
        lambda f: two(f, ("a", [16], 0, 0), ("b", [8], 0, 32)),
        ["tensors a and b overlap at byte 128"],
    ),
    "same place": (
        lambda f: two(f, ("a", [8], 0, 32), ("b", [8], 0, 32)),
        ["tensors a and b overlap"],
    ),
}


def refusal(path: Path) -> str:
    """The sentence, after a check that no more memory was taken than it needs."""
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as caught:
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name, forge, tmp_path):
    make, fragments = DAMAGED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(make(forge))
    sentence = refusal(path)
    assert "bad.gguf: " in sentence
    assert sentence.isprintable()
    assert [f for f in fragments if f not in sentence] == [], sentence


def test_control_characters_of_a_name_stay_out_of_the_sentence(forge, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(one(forge, kind=97, name=b"\x1b[2J\xff\n"))
    sentence = refusal(path)
    assert sentence.isprintable()
    assert r"'\x1b[2J\udcff\n'" in sentence


def test_every_truncation_is_refused(forge, tmp_path):
    whole = forge.small()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    open_gguf(path).close()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        assert "cut.gguf: " in refusal(path)


INTERESTING = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
EDITS = st.lists(
    st.tuples(
        st.floats(0, 0.999),
        st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from(INTERESTING).map(lambda n: n.to_bytes(8, "little")),
        ),
    ),
    max_size=4,
)


@settings(max_examples=400, deadline=None, database=None)
@given(edits=EDITS, keep=st.floats(0.1, 1) | st.just(1.0))
def test_fuzz_gives_a_file_or_a_sentence(edits, keep, fuzz_file, small):
    raw = bytearray(small)
    for where, new in edits:
        at = int(where * len(raw))
        raw[at : at + len(new)] = new
    fuzz_file.write_bytes(raw[: int(keep * len(raw))])
    sentence, total = "fuzz.gguf: ", 0
    tracemalloc.start()
    try:
        with open_gguf(fuzz_file) as file:
            total = sum(int(t.data.sum()) for t in file.tensors.values())
    except GGUFError as error:
        sentence = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "fuzz.gguf: " in sentence
    assert sentence.isprintable()
    assert total <= 255 * len(raw)  # no byte belongs to two tensors
    assert peak < PEAK_BYTES


@pytest.fixture(scope="module")
def fuzz_file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzz.gguf"
