"""Weights where they lie in the file, and products of a few rows with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pykv.backends import plan
from pykv.backends.base import Array, WeightSource

if TYPE_CHECKING:
    from pykv.backends.cpu import CpuBackend
    from pykv.backends.program import Buffer

GROUP_INPUTS, GROUP_BYTES = 128, 640  # of the input rows for byte products, vnni_numba.py
# weight bytes of one task of a matrix-vector product: an eighth, within these
LEAST_TASK_BYTES, MOST_TASK_BYTES = 24 << 10, 512 << 10


class Weight:
    """A matrix [n_out, n_in] where it lies in the file, and how to read it."""

    def __init__(self, tensor: WeightSource) -> None:
        module = plan.cpu_weight_module(tensor)
        self.n_out, self.n_in = tensor.shape if len(tensor.shape) == 2 else (1, tensor.shape[0])
        self.type = tensor.type if module is not None else "f32"
        self.data = tensor.data
        if module is None:
            values = plan.decode(tensor).reshape(self.n_out, self.n_in)
            padded = np.zeros((self.n_out, (self.n_in + 31) // 32 * 32), np.float32)
            padded[:, : self.n_in] = values
            self.data = padded.view(np.uint8)
        self.data = self.data.reshape(self.n_out, -1)
        self.row_bytes = self.data.shape[1]
        self.address = int(self.data.ctypes.data)
        self.width = (self.n_in + 31) // 32 * 32
        share = min(max(self.data.nbytes // 8, LEAST_TASK_BYTES), MOST_TASK_BYTES)
        self.rows_per_task = max(4, share // self.row_bytes // 4 * 4)


def _group(x: Buffer, add: Array | None) -> object:
    """Products of the same rows, as q's, k's and v's, may run at the same time.

    What a product adds may lie where a later one writes, so such a one stays alone.
    """
    return x.memory if add is None else None


def byte_products(
    backend: CpuBackend, x: Buffer, weight: Weight, add: Array | None, out: Buffer, inputs: str
) -> None:
    """Lines for all rows, as byte products of inputs that are rounded to eight bits."""
    n, groups = x.shape[0], -(-weight.width // GROUP_INPUTS)
    if inputs not in x.memory.derived:
        x.memory.derived[inputs] = backend.arena.take(n * groups * GROUP_BYTES)
        backend.emit(
            inputs, n, x, weight.width * 4, weight.width // 32,
            x.memory.derived[inputs].address, groups * GROUP_BYTES,
        )  # fmt: skip
    per_task = weight.rows_per_task
    backend.emit(
        f"vnni_{weight.type}", -(-weight.n_out // per_task), weight.address, weight.row_bytes,
        groups, x.memory.derived[inputs].address, groups * GROUP_BYTES, n, out,
        weight.n_out * 4, weight.n_out, per_task, 0 if add is None else add,
        weight.width // backend.kernels.block_len(weight.type),
        cost=weight.row_bytes * weight.n_out, group=_group(x, add),
    )  # fmt: skip


def matvec(
    backend: CpuBackend,
    x: Buffer,
    weight: Weight,
    add: Array | None,
    out: Buffer,
    first: int,
    rows: int,
) -> None:
    """Lines for 1 or 4 rows from `first` on."""
    per_task = weight.rows_per_task
    at = first * weight.n_out * 4
    backend.emit(
        f"matvec_{weight.type}_r{rows}", -(-weight.n_out // per_task),
        weight.address, weight.row_bytes, weight.width // backend.kernels.block_len(weight.type),
        x.address + first * weight.width * 4, weight.width * 4,
        out.address + at, weight.n_out * 4, weight.n_out, per_task,
        0 if add is None else add.address + at, cost=weight.row_bytes * weight.n_out,
        group=_group(x, add),
    )  # fmt: skip
