"""Products with many rows: panels of weights, decoded to float32 and multiplied by the BLAS.

Each of our threads decodes and multiplies panels of its own, with the BLAS on one thread: threads
of the BLAS would wait in loops on the cores that our kernels need next. A panel is taken when a
thread is free, so that a busy neighbour costs one panel and not half of the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from pykv.backends.base import F32
from pykv.backends.crew import Crew
from pykv.backends.kernels import Kernels

PANEL_BYTES = 2 << 20  # of float32 weights that a thread decodes at a time
LEAST_ROWS = 64  # of a panel: below it the BLAS gets slow
PANELS_PER_THREAD = 3  # at least, so that none has to wait long for the last


class Products:
    """x @ weight.T for float32 x of many rows."""

    def __init__(self, kernels: Kernels, crew: Crew) -> None:
        self._kernels, self._crew = kernels, crew
        self.release()

    def multiply(self, x: F32, weight: Any, out: F32, check: Callable[[], None]) -> None:
        """out[T, n_out] = x[T, n_in] @ weight.T; `check` is called now and then, and may raise."""
        rows = max(PANEL_BYTES // (weight.width * 4), 1)
        share = -(-weight.n_out // (self._crew.threads * PANELS_PER_THREAD))
        rows = min(rows, max(share, LEAST_ROWS), weight.n_out)
        starts, taken = range(0, weight.n_out, rows), itertools.count()
        stop: list[bool] = []

        def work(worker: int) -> None:
            try:
                while not stop:
                    i = next(taken)  # one bytecode: two threads never get the same number
                    if i >= len(starts):
                        return
                    if worker == 0:
                        check()
                    first = starts[i]
                    count = min(rows, weight.n_out - first)
                    panel = self._decode(worker, weight, first, count)
                    np.matmul(x, panel[:, : weight.n_in].T, out=out[:, first : first + count])
            except BaseException:
                stop.append(True)  # the other threads need not go on
                raise

        if len(starts) > 1:
            self._crew.call(work)
        else:
            work(0)

    def _decode(self, worker: int, weight: Any, first: int, count: int) -> F32:
        """Rows of the weights in float32, in this worker's memory."""
        if self._panels[worker].size < count * weight.width:
            self._panels[worker] = np.empty(count * weight.width, np.float32)
        panel = self._panels[worker][: count * weight.width].reshape(count, weight.width)
        blocks = weight.width // self._kernels.block_len(weight.type)
        ctx = np.array(
            [
                weight.address + first * weight.row_bytes, weight.row_bytes, blocks, 0,
                panel.ctypes.data, weight.width * 4, count, count,
            ],
            np.int64,
        )  # fmt: skip
        self._kernels.run_here(f"panel_{weight.type}", ctx)
        return panel

    def release(self) -> None:
        """Give the panels back; they are small, but a prompt is over."""
        self._panels: list[F32] = [np.empty(0, np.float32) for _ in range(self._crew.threads)]
