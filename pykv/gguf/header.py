"""Parse a GGUF header out of a memory map, and trust nothing in it.

Layout, little-endian: magic `GGUF`, u32 version, i64 tensor count, i64 key count, the keys, the
tensor infos, padding to `general.alignment`, then the tensors' bytes.
Source: llama.cpp ggml/src/gguf.cpp, gguf_init_from_file_impl; ggml/include/gguf.h.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykv.errors import GGUFError
from pykv.gguf.types import ARRAY, BOOL, STRING, TENSOR_TYPES, VALUE_TYPES, TensorType

MetadataValue: TypeAlias = bool | int | float | str | list[bytes] | NDArray[Any]

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32  # bytes
MAX_STRING_BYTES = 2**30
MAX_ARRAY_LEN = 2**30
MAX_NAME_BYTES = 63  # ggml keeps a tensor's name in 64 bytes, the last of them NUL
MAX_DIMS = 4
MIN_KEY_BYTES = 13  # key length, value type, a one-byte value
MIN_INFO_BYTES = 24  # name length, dimension count, type, offset

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `start` and `nbytes` are bytes of the whole file."""

    name: str
    shape: tuple[int, ...]  # numpy order, outermost first
    type: TensorType
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What stands before the tensors' bytes; every info lies inside the file, none on another."""

    version: int
    metadata: dict[str, MetadataValue]
    infos: list[TensorInfo]


def shown(name: str) -> str:
    """A name from a file, fit for a sentence: short, and without control characters."""
    if name.isprintable() and 0 < len(name) <= 80:
        return name
    return ascii(name if len(name) <= 80 else name[:77] + "...")


def counted(n: int, what: str) -> str:
    """1 byte, 2 bytes."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


class _Cursor:
    """A place in the map; every read is checked against the end of the file first."""

    def __init__(self, buf: mmap.mmap, file: str) -> None:
        self.buf, self.file, self.end, self.pos = buf, file, len(buf), 0

    def error(self, text: str) -> GGUFError:
        return GGUFError(f"{self.file}: {text}")

    def cut(self, what: str) -> GGUFError:
        return self.error(
            f"the file ends inside {what}, after {counted(self.end, 'byte')}: "
            "it is cut short or damaged, so fetch it again"
        )

    def number(self, kind: struct.Struct, what: str) -> Any:
        if self.end - self.pos < kind.size:
            raise self.cut(what)
        (value,) = kind.unpack_from(self.buf, self.pos)
        self.pos += kind.size
        return value

    def string(self, what: str) -> bytes:
        n = self.number(_U64, what)
        if n > min(self.end - self.pos, MAX_STRING_BYTES):
            raise self.error(
                f"{what} claims a string of {counted(n, 'byte')}, but "
                f"{counted(self.end - self.pos, 'byte')} are left: "
                "the file is cut short or damaged, so fetch it again"
            )
        self.pos += n
        return self.buf[self.pos - n : self.pos]

    def strings(self, count: int, what: str) -> list[bytes]:
        """One tight pass: a vocabulary has hundreds of thousands of them."""
        buf, end, pos = self.buf, self.end, self.pos
        unpack = _U64.unpack_from
        out: list[bytes] = []
        append = out.append
        try:
            for _ in range(count):
                (n,) = unpack(buf, pos)
                start = pos + 8
                pos = start + n
                if pos > end or n > MAX_STRING_BYTES:
                    self.pos = start - 8
                    self.string(f"entry {len(out):,} of {what}")  # raises, with the reason
                append(buf[start:pos])
        except struct.error:
            raise self.cut(f"entry {len(out):,} of {what}") from None
        self.pos = pos
        return out

    def value(self, what: str) -> MetadataValue:
        kind = self.number(_I32, what)
        if kind == STRING:
            return self.string(what).decode("utf-8", "surrogateescape")
        if kind == ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.error(f"{what} has value type {kind}, expected one of 0 to 12")
        value: MetadataValue = self.number(_SCALARS[kind], what)
        return value

    def array(self, what: str) -> MetadataValue:
        kind = self.number(_I32, what)
        if kind == ARRAY:
            raise self.error(f"{what} is an array of arrays, which GGUF does not allow")
        if kind not in VALUE_TYPES:
            raise self.error(f"{what} is an array of value type {kind}, expected one of 0 to 12")
        count = self.number(_U64, what)
        size = VALUE_TYPES[kind].nbytes
        if count > min((self.end - self.pos) // size, MAX_ARRAY_LEN):
            raise self.error(
                f"{what} claims an array of {counted(count, VALUE_TYPES[kind].name)}, but "
                f"{counted(self.end - self.pos, 'byte')} are left: "
                "the file is cut short or damaged, so fetch it again"
            )
        if kind == STRING:
            return self.strings(count, what)
        self.pos += count * size
        # a copy, so that metadata does not keep the map alive; frombuffer over bytes is read-only
        raw = self.buf[self.pos - count * size : self.pos]
        if kind != BOOL:
            return np.frombuffer(raw, VALUE_TYPES[kind].dtype, count)
        bools: NDArray[np.bool_] = np.frombuffer(raw, np.uint8, count) != 0
        bools.flags.writeable = False
        return bools


def parse_header(buf: mmap.mmap, file: str) -> Header:
    """Metadata and tensor infos of a mapped file; `file` is its name for messages.

    Raises GGUFError: anything that is not as the layout says, before memory is taken for it.
    """
    cursor = _Cursor(buf, file)
    version = _version(cursor)
    n_infos = _count(cursor, "tensor")
    n_keys = _count(cursor, "metadata key")
    # no list grows before its length is known to fit
    needs = ((n_keys, "metadata key", MIN_KEY_BYTES), (n_infos, "tensor", MIN_INFO_BYTES))
    for n, what, size in needs:
        if n > (cursor.end - cursor.pos) // size:
            raise cursor.error(
                f"the header claims {counted(n, what)}, more than fit into the "
                f"{counted(cursor.end - cursor.pos, 'byte')} that follow: "
                "the file is cut short or damaged, so fetch it again"
            )
    metadata = _metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    unplaced = [_info(cursor, i) for i in range(n_infos)]
    _refuse_duplicates(cursor, unplaced)
    data = -(-cursor.pos // alignment) * alignment
    infos = [_place(cursor, info, data, alignment) for info in unplaced]
    _refuse_overlap(cursor, infos)
    return Header(version, metadata, infos)


def _version(cursor: _Cursor) -> int:
    magic: bytes = cursor.buf[:4]
    if magic != MAGIC:
        raise cursor.error(
            f"this is not a GGUF file: it starts with {magic!r}, expected {MAGIC!r}; "
            "other formats must be converted to GGUF first"
        )
    cursor.pos = 4
    version: int = cursor.number(_U32, "the version")
    if version and version & 0xFFFF == 0:
        raise cursor.error(
            "this is a big-endian GGUF file, expected little-endian; "
            "convert it with gguf-py's gguf_convert_endian"
        )
    if version == 1:
        raise cursor.error(
            "this is GGUF version 1, expected 2 or 3; convert the original model again"
        )
    if version not in (2, 3):
        raise cursor.error(
            f"this is GGUF version {version}, expected 2 or 3; a newer pykv may know it"
        )
    return version


def _count(cursor: _Cursor, what: str) -> int:
    n: int = cursor.number(_I64, f"the {what} count")
    if n < 0:
        raise cursor.error(f"the {what} count is {n:,}, expected 0 or more: the file is damaged")
    return n


def _metadata(cursor: _Cursor, n_keys: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for i in range(n_keys):
        key = cursor.string(f"the name of metadata key {i:,}").decode("utf-8", "surrogateescape")
        if not key:
            raise cursor.error(f"metadata key {i:,} has an empty name, expected at least 1 byte")
        if key in metadata:
            raise cursor.error(f"metadata key {shown(key)} stands twice in it, expected once")
        metadata[key] = cursor.value(f"metadata key {shown(key)}")
    return metadata


def _alignment(cursor: _Cursor, metadata: dict[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int):
        raise cursor.error("metadata key general.alignment is no integer, expected a power of two")
    if alignment <= 0 or alignment & (alignment - 1):
        raise cursor.error(
            f"metadata key general.alignment is {alignment:,}, expected a power of two"
        )
    return alignment


def _info(cursor: _Cursor, i: int) -> TensorInfo:
    """One tensor's info; `start` is still counted from where the tensors' bytes begin."""
    raw = cursor.string(f"the name of tensor {i:,}")
    name = raw.decode("utf-8", "surrogateescape")
    what = f"tensor {shown(name)}"
    if not 1 <= len(raw) <= MAX_NAME_BYTES:
        raise cursor.error(
            f"{what} (number {i:,}) has a name of {counted(len(raw), 'byte')}, "
            f"expected 1 to {MAX_NAME_BYTES}"
        )
    n_dims = cursor.number(_U32, f"the shape of {what}")
    if n_dims > MAX_DIMS:
        raise cursor.error(f"{what} has {n_dims:,} dimensions, expected {MAX_DIMS} at most")
    shape = tuple(cursor.number(_I64, f"the shape of {what}") for _ in range(n_dims))[::-1]
    if min(shape, default=1) < 1:
        raise cursor.error(f"{what} has shape {list(shape)}, expected dimensions of 1 or more")
    kind = _type(cursor, cursor.number(_I32, f"the type of {what}"), what)
    start = cursor.number(_U64, f"the offset of {what}")
    row = shape[-1] if shape else 1
    if row % kind.block_len:
        raise cursor.error(
            f"{what} has rows of {row:,} values, expected a multiple of {kind.block_len}, "
            f"the block length of its type {kind.name}"
        )
    if prod(shape) >= 2**63:
        raise cursor.error(f"{what} has shape {list(shape)}, expected fewer than 2^63 values")
    return TensorInfo(name, shape, kind, start, prod(shape) // kind.block_len * kind.block_bytes)


def _type(cursor: _Cursor, type_id: int, what: str) -> TensorType:
    kind = TENSOR_TYPES.get(type_id)
    if kind is None:
        raise cursor.error(
            f"{what} has type id {type_id}, which this pykv does not know; a newer version may"
        )
    if kind.requantise_to:
        raise cursor.error(
            f"{what} has type {kind.name} (id {type_id}), which ggml has removed; "
            f"requantise the model to {kind.requantise_to}"
        )
    return kind


def _refuse_duplicates(cursor: _Cursor, infos: list[TensorInfo]) -> None:
    seen: set[str] = set()
    for info in infos:
        if info.name in seen:
            raise cursor.error(f"tensor {shown(info.name)} stands twice in it, expected once")
        seen.add(info.name)


def _place(cursor: _Cursor, info: TensorInfo, data: int, alignment: int) -> TensorInfo:
    what = f"tensor {shown(info.name)}"
    if info.start % alignment:
        raise cursor.error(
            f"{what} has offset {info.start:,}, expected a multiple of the alignment {alignment:,}"
        )
    start = data + info.start
    if start + info.nbytes > cursor.end:
        raise cursor.error(
            f"{what} should lie at bytes {start:,} to {start + info.nbytes:,}, but the file has "
            f"{counted(cursor.end, 'byte')}: it is cut short or damaged, so fetch it again"
        )
    return TensorInfo(info.name, info.shape, info.type, start, info.nbytes)


def _refuse_overlap(cursor: _Cursor, infos: list[TensorInfo]) -> None:
    """Gaps are allowed, shared bytes are not."""
    order = sorted(infos, key=lambda info: info.start)
    for first, second in zip(order, order[1:], strict=False):
        if first.start + first.nbytes > second.start:
            raise cursor.error(
                f"tensors {shown(first.name)} and {shown(second.name)} overlap at byte "
                f"{second.start:,}, expected bytes of their own: the file is damaged"
            )
