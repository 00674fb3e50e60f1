"""Products of heads with matrices of their own, and channels cut out and joined, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv.backends import plan
from pykv.backends.base import U8, WeightSource
from pykv.backends.program import Buffer

if TYPE_CHECKING:
    from pykv.backends.cpu import CpuBackend
    from pykv.backends.products import Products

TASK_BYTES = 64 << 10  # of weights that a thread reads at a time
TASK_VALUES = 16384  # that a thread copies at a time


@dataclass(frozen=True)
class _Matrix:
    """One head's matrix, as products.py reads weights."""

    type: str
    address: int
    row_bytes: int
    width: int
    n_in: int
    n_out: int


class HeadWeights:
    """Matrices [H, n_out, n_in] where they lie in the file, or decoded where no kernel reads them.

    `width`: values of a row, n_in filled up to a multiple of 32.
    """

    def __init__(self, tensor: WeightSource) -> None:
        self.heads, self.n_out, self.n_in = tensor.shape
        self.width = (self.n_in + 31) // 32 * 32
        known = plan.cpu_weight_module(tensor) is not None
        self.type = tensor.type if known else "f32"
        data: U8 = tensor.data
        if not known:
            padded = np.zeros((self.heads, self.n_out, self.width), np.float32)
            padded[:, :, : self.n_in] = plan.decode(tensor)
            data = padded.view(np.uint8)
        self.data = data.reshape(self.heads * self.n_out, -1)
        self.row_bytes = self.data.shape[1]
        self.address = int(self.data.ctypes.data)

    def head(self, h: int) -> _Matrix:
        """The matrix of one head."""
        return _Matrix(
            self.type, self.address + h * self.n_out * self.row_bytes, self.row_bytes, self.width,
            self.n_in, self.n_out,
        )  # fmt: skip


def emit(backend: CpuBackend, x: Buffer, weight: HeadWeights) -> Buffer:
    """Note down x [T, H, n_in] -> [T, H, n_out], by kernels that read the weights' blocks."""
    n, heads = x.shape[0], weight.heads
    out = backend.buffer(n, heads, weight.n_out)
    if weight.width != weight.n_in:
        padded = backend.buffer(n * heads, weight.width)
        backend.emit("resize_rows", n * heads, x, padded, weight.n_in, weight.width)
        x = padded
    per_task = max(8, min(TASK_BYTES // weight.row_bytes, weight.n_out))
    backend.emit(
        f"heads_{weight.type}", heads * -(-weight.n_out // per_task), weight.address,
        weight.row_bytes, weight.width // backend.kernels.block_len(weight.type), x, out, n, heads,
        weight.n_out, per_task, weight.width, cost=weight.data.nbytes,
    )  # fmt: skip
    return out


def multiply(
    backend: CpuBackend, products: Products, x: Buffer, weight: HeadWeights,
    check: Callable[[], None],
) -> Buffer:  # fmt: skip
    """The same by the BLAS, at once; `check` is called now and then, and may raise."""
    out = backend.buffer(*x.shape[:2], weight.n_out)
    for h in range(weight.heads):
        products.multiply(x.array[:, h], weight.head(h), out.array[:, h], check)
    return out


def columns(backend: CpuBackend, x: Buffer, first: int, stop: int) -> Buffer:
    """Note down x's channels `first` to `stop` - 1."""
    out = backend.buffer(*x.shape[:-1], stop - first)
    _copy(backend, x, first, out, 0, stop - first)
    return out


def concat(backend: CpuBackend, x: Buffer, y: Buffer) -> Buffer:
    """Note down x's channels, then y's."""
    n, m = x.shape[-1], y.shape[-1]
    out = backend.buffer(*x.shape[:-1], n + m)
    _copy(backend, x, 0, out, 0, n)
    _copy(backend, y, 0, out, n, m)
    return out


def _copy(backend: CpuBackend, x: Buffer, first: int, out: Buffer, at: int, n: int) -> None:
    """Note down that n channels of each row of x from `first` on go to those of `out` from `at`."""
    rows = int(np.prod(x.shape[:-1]))
    per_task = max(1, TASK_VALUES // n)
    params: tuple[Any, ...] = (x, x.shape[-1], first, out, out.shape[-1], at, n, rows, per_task)
    backend.emit("copy_columns", -(-rows // per_task), *params)
