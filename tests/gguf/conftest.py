"""Forge: GGUF bytes made by hand, so that each field can be made wrong on its own."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

U32, U64, STRING, ARRAY = 4, 10, 8, 9


class Forge:
    """Fields of a GGUF file as bytes, and `file`, which puts them together."""

    @staticmethod
    def string(text: str | bytes) -> bytes:
        raw = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(raw)) + raw

    @classmethod
    def key(cls, name: str | bytes, kind: int, payload: bytes) -> bytes:
        return cls.string(name) + struct.pack("<i", kind) + payload

    @classmethod
    def u32(cls, name: str, value: int) -> bytes:
        return cls.key(name, U32, struct.pack("<I", value))

    @classmethod
    def array(cls, name: str, kind: int, count: int, payload: bytes) -> bytes:
        return cls.key(name, ARRAY, struct.pack("<iQ", kind, count) + payload)

    @classmethod
    def info(cls, name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
        """`dims` in ggml's order: the contiguous one first."""
        head = cls.string(name) + struct.pack("<I", len(dims))
        return head + struct.pack(f"<{len(dims)}qiQ", *dims, kind, offset)

    @classmethod
    def file(
        cls,
        keys: Sequence[bytes] = (),
        infos: Sequence[bytes] = (),
        data: bytes = b"",
        *,
        magic: bytes = b"GGUF",
        version: int = 3,
        n_infos: int | None = None,
        n_keys: int | None = None,
        alignment: int = 32,
    ) -> bytes:
        head = magic + struct.pack(
            "<Iqq",
            version,
            len(infos) if n_infos is None else n_infos,
            len(keys) if n_keys is None else n_keys,
        )
        head += b"".join(keys) + b"".join(infos)
        return head + (b"\0" * (-len(head) % alignment) + data if data else b"")

    @classmethod
    def small(cls) -> bytes:
        """A sound file: four keys of the main kinds, an f32 vector and a q4_0 matrix [2, 64]."""
        keys = [
            cls.key("general.architecture", STRING, cls.string("llama")),
            cls.u32("llama.block_count", 2),
            cls.array("tokens", STRING, 3, cls.string("a") + cls.string("") + cls.string("bc")),
            cls.array("heads", 5, 2, struct.pack("<ii", 3, -4)),
        ]
        infos = [cls.info("norm", [8], 0, 0), cls.info("weight", [64, 2], 2, 32)]
        return cls.file(keys, infos, bytes(range(32)) + bytes(range(72)))


@pytest.fixture
def forge() -> type[Forge]:
    return Forge


@pytest.fixture(scope="session")
def small() -> bytes:
    return Forge.small()
