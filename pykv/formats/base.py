"""What every block format offers: rows as a GGUF file holds them, and pages of the KV cache.

A format's `layout` is the struct of one block, so that its file reads as the specification. Rows
are blocks side by side. A page holds up to 64 tokens of one KV head: a key page channel by
channel, a value page in blocks of 32 channels, and in each of those token by token.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pykv.errors import FormatError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Blocks = npt.NDArray[Any]  # [..., N] of a format's layout
Side = Literal["key", "value"]

PAGE_TOKENS = 64  # tokens in a full page
RUN = 16  # tokens of one channel, or channels of one token: a page holds whole runs
VALUE_CHANNELS = 32  # channels of a value page's block
PAGE_ALIGN = 64  # bytes; a page's size is a multiple


class BlockFormat:
    """One block layout.  A subclass gives the data below and the coders that it has.

    `decode_blocks` and `encode_blocks` see whole blocks only; rows are checked here.
    """

    roles: ClassVar[tuple[str, ...]] = ("weight",)  # of "weight" and "cache"
    key_axis: ClassVar[str] = "none"  # what the values of a page that share a scale lie along
    block_len: ClassVar[int] = 32  # values
    residual: ClassVar[int] = 0  # newest tokens that stay exact in the cache, by default
    transform: ClassVar[str] = "none"  # what `auto` maps pages by: none, hadamard or random
    # what a calibration file holds for it: a scale, which is 1 without one, or what it cannot do
    # without: levels, and ranges of key channels
    calibration: ClassVar[Literal["none", "scale", "levels"]] = "none"
    key_position: ClassVar[Literal["write", "read"]] = "write"  # when RoPE turns the keys
    layout: ClassVar[np.dtype[Any]]  # of one block; a field's shape is the one it is computed in

    @property
    def name(self) -> str:
        """The registry's key: the name of the format's file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layout.itemsize

    # rows

    def decode(self, buf: U8) -> F32:
        """u8 [..., N * block_bytes] -> f32 [..., N * block_len], for floats perhaps a view.

        Raises FormatError: a torn block.
        """
        blocks = self.unpack(buf)
        # a damaged file may hold an infinite scale; whoever uses the values checks them
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.decode_blocks(blocks)
        return values.reshape(*blocks.shape[:-1], blocks.shape[-1] * self.block_len)

    def encode(self, x: F32) -> U8:
        """f32 [..., N * block_len] -> u8 [..., N * block_bytes].

        Raises FormatError: a row that no block divides, values that are not finite or too large
        for the scale, or a format that pykv only decodes.
        """
        values = self.blocks(x)
        if not np.isfinite(values).all():
            raise FormatError(f"{self.name}: NaN or infinity among the values to encode")
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            blocks = self.encode_blocks(values)
        for field in blocks.dtype.names or ():
            if blocks[field].dtype.kind == "f" and not np.isfinite(blocks[field]).all():
                raise FormatError(
                    f"{self.name}: values up to {np.abs(values).max():.6g} need a scale beyond "
                    "65504, the largest half float; use a wider type"
                )
        rows = (*blocks.shape[:-1], blocks.shape[-1] * self.block_bytes)
        return np.ascontiguousarray(blocks).view(np.uint8).reshape(rows)

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N, ...], in each block its values in order."""
        raise NotImplementedError

    def encode_blocks(self, x: F32) -> Blocks:
        """f32 [..., N, block_len] -> layout [..., N].  Raises FormatError: there is no encoder."""
        raise FormatError(f"{self.name}: pykv reads this type but does not write it")

    def blocks(self, x: F32) -> F32:
        """f32 [..., N * block_len] -> f32 [..., N, block_len].  Raises FormatError."""
        x = np.asarray(x, np.float32)
        n, rest = divmod(x.shape[-1], self.block_len)
        if rest:
            raise FormatError(
                f"{self.name}: a row of {x.shape[-1]} values does not divide into blocks of "
                f"{self.block_len}"
            )
        return x.reshape(*x.shape[:-1], n, self.block_len)

    def unpack(self, buf: U8) -> Blocks:
        """u8 [..., N * block_bytes] -> layout [..., N].  Raises FormatError: a torn block."""
        n, rest = divmod(buf.shape[-1], self.block_bytes)
        if rest:
            raise FormatError(
                f"{self.name}: a row of {buf.shape[-1]} bytes does not divide into blocks of "
                f"{self.block_bytes} bytes"
            )
        return np.ascontiguousarray(buf).view(self.layout).reshape(*buf.shape[:-1], n)

    def pack(self, **fields: npt.NDArray[Any]) -> Blocks:
        """The fields, each [..., N, ...] -> layout [..., N]."""
        lead = next(iter(fields.values())).shape[:-1]
        blocks = np.empty(lead, self.layout)
        for field, values in fields.items():
            blocks[field] = values.reshape(blocks[field].shape)
        return blocks

    # pages

    def page_bytes(self, d: int, side: Side, n: int = PAGE_TOKENS) -> int:
        """Bytes of a page of n tokens for a head of width d.  Raises FormatError: not a cache."""
        raise self._no_pages()

    def bits_per_value(self, d: int, side: Side) -> float:
        """Bits that a cached value costs in a full page, scales and padding included."""
        return self.page_bytes(d, side) * 8 / (PAGE_TOKENS * d)

    def encode_keys(self, x: F32) -> U8:
        """f32 [n, d] -> a key page, u8.  Raises FormatError: n is no multiple of 16 up to 64."""
        raise self._no_pages()

    def decode_keys(self, page: U8, d: int, n: int) -> F32:
        """A key page, u8 -> f32 [n, d].  Raises FormatError: a page of another size."""
        raise self._no_pages()

    def encode_values(self, x: F32) -> U8:
        """f32 [n, d] -> a value page, u8.  Raises FormatError: as `encode_keys`."""
        raise self._no_pages()

    def decode_values(self, page: U8, d: int, n: int) -> F32:
        """A value page, u8 -> f32 [n, d].  Raises FormatError: a page of another size."""
        raise self._no_pages()

    def _no_pages(self) -> FormatError:
        return FormatError(f"{self.name}: a type of weights, which the KV cache cannot hold")


class FloatFormat(BlockFormat):
    """A type that stores each value by itself, as one number of `layout`."""

    roles = ("weight", "cache")
    block_len = 1
    page_limit: ClassVar[float] = math.inf  # finite values beyond it are stored in pages as it

    def narrow(self, x: F32) -> npt.NDArray[Any]:
        """f32 -> layout, rounded to nearest even."""
        raise NotImplementedError

    def widen(self, stored: npt.NDArray[Any]) -> F32:
        """Layout -> f32, exact."""
        raise NotImplementedError

    def encode(self, x: F32) -> U8:
        """f32 [..., D] -> u8 [..., D * block_bytes]; NaN and infinity are kept."""
        x = np.asarray(x, np.float32)
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(self.narrow(x))
        return stored.view(np.uint8).reshape(*x.shape[:-1], x.shape[-1] * self.block_bytes)

    def decode_blocks(self, blocks: Blocks) -> F32:
        """Layout [..., N] -> f32 [..., N]."""
        return self.widen(blocks)

    def page_bytes(self, d: int, side: Side, n: int = PAGE_TOKENS) -> int:
        """Bytes of a page of n tokens for a head of width d."""
        width = d if side == "key" else padded(d)
        return -(-width * n * self.block_bytes // PAGE_ALIGN) * PAGE_ALIGN

    def encode_keys(self, x: F32) -> U8:
        """f32 [n, d] -> u8, [d][n].  Raises FormatError: n is no multiple of 16 up to 64."""
        n, d = x.shape
        _check_tokens(self.name, n)
        return self._page(x.T, self.page_bytes(d, "key", n))

    def decode_keys(self, page: U8, d: int, n: int) -> F32:
        """u8, [d][n] -> f32 [n, d].  Raises FormatError: a page of another size."""
        return self._values(page, self.page_bytes(d, "key", n), (d, n)).T

    def encode_values(self, x: F32) -> U8:
        """f32 [n, d] -> u8, [d / 32][n][32].  Raises FormatError: as `encode_keys`."""
        n, d = x.shape
        _check_tokens(self.name, n)
        filled = np.pad(x, ((0, 0), (0, padded(d) - d)))
        blocks = filled.reshape(n, -1, VALUE_CHANNELS).transpose(1, 0, 2)
        return self._page(blocks, self.page_bytes(d, "value", n))

    def decode_values(self, page: U8, d: int, n: int) -> F32:
        """u8, [d / 32][n][32] -> f32 [n, d].  Raises FormatError: a page of another size."""
        shape = (padded(d) // VALUE_CHANNELS, n, VALUE_CHANNELS)
        blocks = self._values(page, self.page_bytes(d, "value", n), shape)
        return blocks.transpose(1, 0, 2).reshape(n, -1)[:, :d]

    def _page(self, x: F32, nbytes: int) -> U8:
        """The values in C order, then zeros up to the page's size."""
        x = np.asarray(x, np.float32)
        limited = np.clip(x, -self.page_limit, self.page_limit)
        page = np.zeros(nbytes, np.uint8)
        codes = np.ascontiguousarray(self.narrow(np.where(np.isfinite(x), limited, x)))
        page[: codes.nbytes] = codes.view(np.uint8).reshape(-1)
        return page

    def _values(self, page: U8, nbytes: int, shape: tuple[int, ...]) -> F32:
        if page.shape != (nbytes,):
            raise FormatError(
                f"{self.name}: a page of shape {page.shape}, where {nbytes} bytes were expected"
            )
        used = page[: math.prod(shape) * self.block_bytes]
        return self.widen(np.ascontiguousarray(used).view(self.layout)).reshape(shape)


def padded(d: int) -> int:
    """Channels of a value page."""
    return -(-d // VALUE_CHANNELS) * VALUE_CHANNELS


def _check_tokens(name: str, n: int) -> None:
    if not 0 < n <= PAGE_TOKENS or n % RUN:
        raise FormatError(f"{name}: a page takes 16, 32, 48 or 64 tokens, not {n}")


# numerics that several block formats share


def extreme(x: F32) -> F32:
    """f32 [..., n] -> [..., 1]: the value of largest magnitude, with its sign; the first wins."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)


def reciprocal(d: F32) -> F32:
    """1 / d, and 0 where that is not a finite float32: such a block's scale rounds to 0."""
    inverse = 1 / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def bit_fields(codes: U8, width: int) -> U8:
    """u8 [..., B] -> u8 [..., 8 / width, B]: the fields of `width` bits, the lowest first."""
    mask = np.uint8((1 << width) - 1)
    return np.stack([codes >> np.uint8(shift) & mask for shift in range(0, 8, width)], -2)


def join_nibbles(codes: U8) -> U8:
    """u8 [..., 2 * n], each below 16 -> u8 [..., n]: the first half in the low nibbles."""
    low, high = np.split(codes, 2, -1)
    return low | high << np.uint8(4)
