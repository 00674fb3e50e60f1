"""llama.cpp's file of logits: what a run predicted, for later runs to be compared with.

Layout, little-endian: "_logits_" | n_ctx u32 | n_vocab i32 | n_chunks i32 | tokens i32
[n_chunks, n_ctx] | a row for each scored token: scale f32, least f32, codes u16 [n_vocab], and one
more code, unused, where n_vocab is odd. ln p = scale * code + least. A logit more than 16 below its
row's largest is raised to that before, and a step is at most 2.5e-4.

Source: llama.cpp tools/perplexity/perplexity.cpp, log_softmax(), perplexity(), kl_divergence().
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32, I32
from pykv.errors import ConfigError

MAGIC = b"_logits_"
REACH = 16.0  # how far below the largest logit codes go
_HEADER = struct.Struct("<8sIii")
_TOP_CODE = 65535
_LEAST_CHUNK = 4  # tokens, of which one is scored

Row = NDArray[np.void]


@dataclass(frozen=True)
class Extent:
    """How much a file holds."""

    n_ctx: int  # tokens of a chunk
    n_vocab: int
    n_chunks: int

    @property
    def n_scored(self) -> int:
        """Rows of a chunk: its second half's tokens but the last are predicted from."""
        return self.n_ctx - 1 - self.n_ctx // 2

    @property
    def row(self) -> np.dtype[np.void]:
        """One scored token."""
        codes = ("codes", "<u2", (self.n_vocab + self.n_vocab % 2,))
        return np.dtype([("scale", "<f4"), ("least", "<f4"), codes])

    @property
    def first_row(self) -> int:
        """Where rows begin, in bytes."""
        return _HEADER.size + 4 * self.n_ctx * self.n_chunks

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return 8 + 2 * (self.n_vocab + self.n_vocab % 2)

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return self.first_row + self.n_chunks * self.n_scored * self.row_bytes


def encode(logits: F32, extent: Extent) -> Row:
    """Rows of logits f32 [T, V]; they must be finite."""
    rows = np.zeros(len(logits), extent.row)
    for i, x in enumerate(logits):
        with np.errstate(over="ignore"):  # a far lower logit may well become -infinity
            x = x - x.max()
        bottom = max(x.min(), np.float32(-REACH))
        rows["least"][i] = bottom - np.float32(np.log(np.exp(x).sum(dtype=np.float64)))
        rows["scale"][i] = scale = -bottom / np.float32(_TOP_CODE)
        if scale > np.finfo(np.float32).tiny:  # all equal, else: code 0
            codes = np.rint((np.maximum(x, bottom) - bottom) * (np.float32(1) / scale))
            rows["codes"][i, : len(x)] = codes
    return rows


def decode(rows: Row, n_vocab: int) -> F32:
    """Log-probabilities f32 [T, V]."""
    codes = rows["codes"][:, :n_vocab].astype(np.float32)
    codes *= rows["scale"][:, None]
    codes += rows["least"][:, None]
    return codes


class LogitsWriter:
    """Writes such a file while a run goes on; a context manager.

    The file takes its name when all of it is written, and what an interrupted run has written is
    removed. `announce(bytes)` is told the size before anything is computed.
    """

    def __init__(
        self, path: str | os.PathLike[str], announce: Callable[[int], None] | None = None
    ) -> None:
        # the file that a link points to is replaced, not the link
        self.path = Path(os.path.realpath(path))
        self._announce = announce
        self._part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        self._extent: Extent | None = None
        self._left = 0  # rows to come
        self._file: BinaryIO

    def __enter__(self) -> LogitsWriter:
        """Raises ConfigError: no file can have that name, or one that holds no logits has it."""
        if not self.path.parent.is_dir():
            raise ConfigError(f"{self.path}: there is no such folder, create it first")
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{self.path} is a folder or a device, give the name of a file")
        if self.path.exists() and self.path.stat().st_size > 0:
            with self.path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:  # a text, or a model
                    raise ConfigError(
                        f"{self.path} is there already and holds no logits, so it is not replaced: "
                        "give another name"
                    )
        try:
            self._file = open(self._part, "wb")  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from error
        return self

    def begin(self, tokens: I32, n_vocab: int) -> None:
        """Write what comes before the rows; tokens i32 [n_chunks, n_ctx].

        Raises ConfigError: the disk has too little room.
        """
        extent = Extent(tokens.shape[1], n_vocab, tokens.shape[0])
        free = shutil.disk_usage(self.path.parent).free
        if extent.nbytes > free:
            raise ConfigError(
                f"{self.path} would take {extent.nbytes:,} bytes, and its disk has {free:,} free: "
                "make room, or read fewer chunks"
            )
        if self._announce is not None:
            self._announce(extent.nbytes)
        self._extent, self._left = extent, extent.n_chunks * extent.n_scored
        self._write(_HEADER.pack(MAGIC, extent.n_ctx, extent.n_vocab, extent.n_chunks))
        self._write(tokens.astype("<i4").tobytes())

    def add(self, logits: F32) -> None:
        """The next scored tokens' logits, f32 [T, V]."""
        if self._extent is None or len(logits) > self._left:
            raise ConfigError(f"{self.path}: rows were added that no chunk of it asks for")
        self._write(encode(logits, self._extent).tobytes())
        self._left -= len(logits)

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> OSError:
        """The same error, under the name that the user gave."""
        return OSError(error.errno, error.strerror, str(self.path))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        complete = kind is None and self._extent is not None and self._left == 0
        try:
            self._file.close()  # which writes what is still buffered
            if complete:
                os.replace(self._part, self.path)
        except OSError as failure:
            if kind is None:  # else the first error is the one to tell
                raise self._failed(failure) from failure
        finally:
            self._part.unlink(missing_ok=True)


class LogitsReader:
    """Reads such a file; a context manager.

    Raises ConfigError: it is none, or is damaged; OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115
        try:
            self.extent = self._header()
            data = self._file.read(4 * self.extent.n_ctx * self.extent.n_chunks)
            self.tokens: I32 = np.frombuffer(data, "<i4").astype(np.int32)
            self.tokens = self.tokens.reshape(self.extent.n_chunks, self.extent.n_ctx)
            if (self.tokens < 0).any() or (self.tokens >= self.extent.n_vocab).any():
                raise self._damaged("it holds tokens outside its vocabulary")
        except BaseException:
            self.close()
            raise

    def _damaged(self, how: str) -> ConfigError:
        return ConfigError(f"{self.path} is damaged, {how}: write it again")

    def _header(self) -> Extent:
        head = self._file.read(_HEADER.size)
        if head[: len(MAGIC)] != MAGIC:
            raise ConfigError(
                f"{self.path} is no file of logits, which begins with {MAGIC.decode()}: "
                "write one with --save-all-logits"
            )
        if len(head) < _HEADER.size:
            raise self._damaged(f"its header breaks off after {len(head)} bytes")
        extent = Extent(*_HEADER.unpack(head)[1:])
        if extent.n_ctx < _LEAST_CHUNK or extent.n_vocab < 1 or extent.n_chunks < 1:
            raise self._damaged(
                f"its header tells of {extent.n_chunks} chunks of {extent.n_ctx} tokens "
                f"and a vocabulary of {extent.n_vocab}"
            )
        size = os.fstat(self._file.fileno()).st_size
        if size != extent.nbytes:
            what = "truncated" if size < extent.nbytes else "too long"
            raise ConfigError(
                f"{self.path} is {what}: its {extent.n_chunks} chunks take {extent.nbytes:,} "
                f"bytes, and it has {size:,}; write it again"
            )
        return extent

    def read(self, chunk: int, first: int, count: int) -> F32:
        """Log-probabilities f32 [count, V] of a chunk's scored tokens, from its row `first` on.

        Raises ConfigError: a row's numbers make no sense.
        """
        extent = self.extent
        self._file.seek(extent.first_row + (chunk * extent.n_scored + first) * extent.row_bytes)
        rows: Any = np.fromfile(self._file, extent.row, count)
        if len(rows) != count:
            raise self._damaged("it became shorter while it was read")
        scale, least = rows["scale"], rows["least"]
        if not (np.isfinite(scale) & np.isfinite(least) & (scale >= 0)).all():
            raise self._damaged(f"chunk {chunk} has probabilities that are no numbers")
        return decode(rows, extent.n_vocab)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def __enter__(self) -> LogitsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
