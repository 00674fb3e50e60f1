"""Write a GGUF file, version 3: metadata, then float32 and float16 tensors.

The file appears under its name when it is whole: it is written beside it and then renamed.
Source: llama.cpp ggml/src/gguf.cpp, gguf_writer; ggml/include/gguf.h.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pykv.errors import GGUFError
from pykv.gguf.header import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_NAME_BYTES,
    MetadataValue,
    counted,
    shown,
)
from pykv.gguf.types import ARRAY, BOOL, STRING, TENSOR_TYPE_IDS, VALUE_TYPES

VERSION = 3
_NUMBERS = {np.dtype(kind.dtype): i for i, kind in VALUE_TYPES.items() if kind.dtype}
# whole numbers without a type of their own get the first of these that holds them
_INTEGERS = (np.uint32, np.int32, np.uint64, np.int64)
_TENSORS = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, MetadataValue | list[str]],
    tensors: Mapping[str, NDArray[Any]],
) -> None:
    """Write a file; its folder must exist, and a file of that name is replaced.

    Python's whole numbers become uint32, or the next type that holds them, its floats float32;
    NumPy's numbers and arrays of one axis keep their type. Tensors are float32 or float16.
    Raises GGUFError: a name or a value that GGUF cannot hold; OSError, with the file's name.
    """
    target = Path(path)
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))  # type: ignore[arg-type]
    head = _head(target.name, metadata, tensors, alignment)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(head)
            _fill(file, alignment)
            for tensor in tensors.values():
                file.write(np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).data)
                _fill(file, alignment)
        part.replace(target)
    except OSError as error:  # the part's name is no news to anybody
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        part.unlink(missing_ok=True)


def _fill(file: BinaryIO, alignment: int) -> None:
    file.write(b"\0" * (-file.tell() % alignment))


def _head(
    file: str, metadata: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], alignment: int
) -> bytes:
    parts = [MAGIC, struct.pack("<Iqq", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if not key:
            raise GGUFError(f"{file}: a metadata key has an empty name, expected at least 1 byte")
        parts += [_string(key), _value(file, key, value)]
    start = 0
    for name, tensor in tensors.items():
        parts.append(_info(file, name, tensor, start))
        start += -(-tensor.nbytes // alignment) * alignment
    return b"".join(parts)


def _info(file: str, name: str, tensor: NDArray[Any], start: int) -> bytes:
    what = f"{file}: tensor {shown(name)}"
    if not 1 <= len(_bytes(name)) <= MAX_NAME_BYTES:
        raise GGUFError(
            f"{what} has a name of {counted(len(_bytes(name)), 'byte')}, "
            f"expected 1 to {MAX_NAME_BYTES}"
        )
    kind = _TENSORS.get(tensor.dtype.newbyteorder("="))
    if kind is None:
        raise GGUFError(f"{what} has type {tensor.dtype}, expected float32 or float16")
    if not 1 <= tensor.ndim <= MAX_DIMS or tensor.size == 0:
        raise GGUFError(
            f"{what} has shape {list(tensor.shape)}, expected 1 to {MAX_DIMS} dimensions of 1 or "
            "more"
        )
    dims = tensor.shape[::-1]
    return _string(name) + struct.pack(
        f"<I{len(dims)}qiQ", len(dims), *dims, TENSOR_TYPE_IDS[kind], start
    )


def _value(file: str, key: str, value: Any) -> bytes:
    """The value's type and bytes."""
    if isinstance(value, str):
        return struct.pack("<i", STRING) + _string(value)
    if isinstance(value, list):
        texts = b"".join(_string(text) for text in value)
        return struct.pack("<iiQ", ARRAY, STRING, len(value)) + texts
    what = f"{file}: metadata key {shown(key)}"
    array = _number(what, value)
    kind = _NUMBERS.get(array.dtype.newbyteorder("<"))
    if kind is None or array.ndim > 1:
        raise GGUFError(
            f"{what} is an array of {array.dtype} with {array.ndim} axes, expected text, a number "
            "or one axis of numbers"
        )
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    if array.ndim == 0:
        return struct.pack("<i", kind) + data
    return struct.pack("<iiQ", ARRAY, kind, len(array)) + data


def _number(what: str, value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if isinstance(value, bool):
        return np.asarray(value, VALUE_TYPES[BOOL].dtype)
    if isinstance(value, float):
        return np.asarray(value, np.float32)
    for kind in _INTEGERS:
        if isinstance(value, int) and np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            return np.asarray(value, kind)
    raise GGUFError(f"{what} is {ascii(value)[:40]}, expected text, a number, or an array of one")


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _string(text: str | bytes) -> bytes:
    data = _bytes(text)
    return struct.pack("<Q", len(data)) + data
