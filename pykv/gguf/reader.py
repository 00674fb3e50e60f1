"""Open a GGUF file, or all shards of a split one, as a memory map; no weight is copied.

Source: llama.cpp src/llama-model-loader.cpp, the constructor (splits); src/llama.cpp,
llama_split_path (their names).
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from pykv.errors import GGUFError
from pykv.gguf.header import Header, MetadataValue, counted, parse_header, shown
from pykv.gguf.metadata import Metadata

_SHARD = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor where it lies: `data` u8 [rows..., row bytes], a read-only view of the map."""

    name: str
    shape: tuple[int, ...]  # numpy order, outermost first: a matrix is [n_out, n_in]
    type: str  # "q4_1"
    block_len: int  # values
    block_bytes: int
    nbytes: int
    data: NDArray[np.uint8]
    file: str  # for messages

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a matrix, as a view.  Raises GGUFError: not in it, or no matrix."""
        if len(self.shape) != 2 or not 0 <= start < stop <= self.shape[0]:
            raise GGUFError(
                f"{self.file}: tensor {shown(self.name)} has shape {list(self.shape)}, "
                f"expected a matrix with rows {start:,} to {stop:,}"
            )
        data = self.data[start:stop]
        return replace(
            self,
            name=f"{self.name}[{start}:{stop}]",
            shape=(stop - start, self.shape[1]),
            nbytes=data.nbytes,
            data=data,
        )


class GGUFFile(Metadata):
    """An open model file: `metadata`, `tensors`, and the map that they stand on.

    `nbytes` counts the tensors' bytes, of all shards.  Arrays of strings are lists of bytes, since
    a token need not be UTF-8; numeric arrays are read-only copies, and outlive the file.
    """

    def __init__(
        self,
        path: Path,
        version: int,
        metadata: dict[str, MetadataValue],
        tensors: dict[str, Tensor],
        maps: list[mmap.mmap],
    ) -> None:
        self.path, self.file, self.version = path, path.name, version
        self.metadata, self.tensors = metadata, tensors
        self.nbytes = sum(t.nbytes for t in tensors.values())
        self.closed = False
        self._maps = maps

    def require(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor `name`.  Raises GGUFError: it is missing, or its shape is not `shape`."""
        tensor = self.tensors.get(name)
        if tensor is None:
            holds = f"the file holds {counted(len(self.tensors), 'tensor')}"
            if not self.tensors:
                holds = "the file is closed" if self.closed else "the file holds a vocabulary only"
            raise GGUFError(f"{self.file}: tensor {shown(name)} is missing, {holds}")
        if shape is not None and tensor.shape != shape:
            raise GGUFError(
                f"{tensor.file}: tensor {shown(name)} has shape {list(tensor.shape)}, "
                f"expected {list(shape)}"
            )
        return tensor

    def close(self) -> None:
        """Give the map back, at once or when the last view of it is dropped."""
        self.closed = True
        self.tensors = {}
        for each in self._maps:
            # views that live on keep the map; it is unmapped together with the last of them
            with suppress(BufferError):
                each.close()
        self._maps = []

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Map a model file; of a split one, `path` is the first shard, the others lie beside it.

    Raises GGUFError: no such file, not GGUF, damaged, or shards that do not belong together.
    """
    first = Path(path)
    with _unmap_on_error() as maps:
        header = _open_shard(first, maps)
        shards = [(first, header)]
        for sibling in _siblings(first, header):
            shards.append((sibling, _open_shard(sibling, maps)))
        _check_split(shards)
        tensors: dict[str, Tensor] = {}
        for (shard, part), buf in zip(shards, maps, strict=True):
            base = np.frombuffer(buf, np.uint8)
            for tensor in _views(part, base, shard.name):
                if tensor.name in tensors:
                    raise GGUFError(
                        f"{shard.name}: tensor {shown(tensor.name)} stands in "
                        f"{tensors[tensor.name].file} too, expected once"
                    )
                tensors[tensor.name] = tensor
        return GGUFFile(first, header.version, header.metadata, tensors, maps)


@contextmanager
def _unmap_on_error() -> Iterator[list[mmap.mmap]]:
    maps: list[mmap.mmap] = []
    try:
        yield maps
    except BaseException:
        for each in maps:
            with suppress(BufferError):
                each.close()
        raise


def _open_shard(path: Path, maps: list[mmap.mmap]) -> Header:
    buf = _map(path)
    maps.append(buf)
    return parse_header(buf, path.name)


def _map(path: Path) -> mmap.mmap:
    """The whole file, read-only.  Raises GGUFError: it cannot be opened, or is empty."""
    try:
        # a pipe would block at open, so the kind is asked first
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise GGUFError(f"{path}: this is a folder, expected a GGUF file")
        if not stat.S_ISREG(mode):
            raise GGUFError(f"{path}: this is no regular file, expected a GGUF file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GGUFError(f"{path}: the file is empty, expected a GGUF file; fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise GGUFError(f"{path}: no such file, expected a GGUF file") from None
    except ValueError:
        raise GGUFError(f"{ascii(str(path))}: this cannot be a file's name") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise GGUFError(f"{path}: the file cannot be read: {reason}") from None


def _views(header: Header, base: NDArray[np.uint8], file: str) -> Iterator[Tensor]:
    for info in header.infos:
        kind = info.type
        rows = info.shape[:-1]
        row_bytes = (info.shape[-1] if info.shape else 1) // kind.block_len * kind.block_bytes
        data = base[info.start : info.start + info.nbytes].reshape(*rows, row_bytes)
        yield Tensor(
            info.name,
            info.shape,
            kind.name,
            kind.block_len,
            kind.block_bytes,
            info.nbytes,
            data,
            file,
        )


def _split_int(header: Header, key: str, file: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise GGUFError(f"{file}: metadata key {key} is no integer, expected one")
    return value


def _siblings(first: Path, header: Header) -> list[Path]:
    """The other shards, by name.  A split.count of 1 or less means that the file is whole."""
    count = _split_int(header, "split.count", first.name, 1)
    if count <= 1:
        return []
    match = _SHARD.fullmatch(first.name)
    if match is None:
        raise GGUFError(
            f"{first.name}: this is a shard of a model split into {count:,}, "
            f"expected a name that ends in -00001-of-{count:05d}.gguf, by which the others are "
            "found; give the shards their names back"
        )
    if int(match["count"]) != count:
        raise GGUFError(
            f"{first.name}: metadata key split.count is {count:,}, "
            f"expected {int(match['count']):,} as in the file's name"
        )
    prefix = match["prefix"]
    no = _split_int(header, "split.no", first.name, 0)
    if no != 0 or int(match["no"]) != 1:
        raise GGUFError(
            f"{first.name}: this is not the first shard (metadata key split.no is {no:,}); "
            f"open {prefix}-00001-of-{count:05d}.gguf"
        )
    paths = [first.with_name(f"{prefix}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    for i, path in enumerate(paths, 2):
        if not path.is_file():
            raise GGUFError(
                f"{first.name}: shard {i:,} of {count:,} is missing, "
                f"expected {path.name} beside it; fetch that file too"
            )
    return paths


def _check_split(shards: list[tuple[Path, Header]]) -> None:
    """Each shard says which it is and of how many, and the first how many tensors all have."""
    if len(shards) == 1:
        return
    for i, (path, header) in enumerate(shards):
        for key, expected in ("split.no", i), ("split.count", len(shards)):
            value = _split_int(header, key, path.name, -1)
            if value != expected:
                found = f"is {value:,}" if key in header.metadata else "is missing"
                raise GGUFError(
                    f"{path.name}: metadata key {key} {found}, expected {expected:,}: "
                    "it is not this shard of this model"
                )
    total = sum(len(header.infos) for _, header in shards)
    first, header = shards[0]
    expected = _split_int(header, "split.tensors.count", first.name, total)
    if total != expected:
        raise GGUFError(
            f"{first.name}: the {len(shards):,} shards hold {counted(total, 'tensor')}, "
            f"expected {expected:,} by metadata key split.tensors.count"
        )
