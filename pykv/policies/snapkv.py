"""snapkv: after a prompt, the tokens that its last queries looked at most, and their neighbours.

The last `window` queries vote: their attention is summed per cell, each sum is replaced by the
largest among its `pool` neighbours, and the query heads of a KV head are averaged. The cells with
most votes fill what window and sinks leave of the budget; of equal ones the newest stay.
Source: Li et al. 2024, arXiv:2404.14469, section 4; FasterDecoding/SnapKV
snapkv/monkeypatch/snapkv_utils.py, class SnapKVCluster.update_kv. We differ: one list per KV head,
from the mean over its query heads after pooling, where the reference selects per query head and
keeps keys and values once for each; max pooling over 7 and a window of 32 are the reference's
settings for LongBench, not the defaults of its class (average, 5, 64); the sinks are kept beside
the selection and lend no votes to their neighbours. After a later turn of a chat, neighbours are
the tokens that are still kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from pykv.policies.base import F32, Bool, Cells, Policy, Window


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keeps, when a prompt ends, the most voted cells and the newest ones.

    window: queries that vote, and newest tokens that always stay, 1 to 512.
    pool: cells that share the largest vote among them, odd, 1 to 63.
    """

    window: int = 32
    pool: int = 7

    name: ClassVar[str] = "snapkv"
    moment: ClassVar[Literal["prompt"]] = "prompt"
    needs: ClassVar[Literal["window"]] = "window"
    per_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._require(1 <= self.window <= 512, f"window must be 1 to 512, not {self.window}")
        odd = 1 <= self.pool <= 63 and self.pool % 2 == 1
        self._require(odd, f"pool must be odd, 1 to 63, not {self.pool}")

    @property
    def n_queries(self) -> int:
        """The window."""
        return self.window

    def recent_tokens(self, budget: int, sinks: int) -> int:
        """The window, whatever the budget."""
        return self.window

    def select(self, cells: Cells, window: Window, budget: int) -> Bool:
        """The window and the most voted cells, [G, C]; with the sinks at most `budget`."""
        places = cells.positions
        live = places >= 0
        older = live & (places <= cells.now - self.window)
        n_older = older.sum(-1)  # [G]
        room = np.maximum(budget - cells.sinks - (live.sum(-1) - n_older), 0)
        votes = np.where(older, self.votes(cells, window), -1)
        # the least voted first, of equal ones the oldest
        order = np.lexsort((places, votes), axis=-1)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(order.shape[-1])[None], -1)
        voted: Bool = rank >= (order.shape[-1] - np.minimum(room, n_older))[:, None]
        return live & (voted | ~older)

    def votes(self, cells: Cells, window: Window) -> F32:
        """What each cell older than the window was given, pooled by position, f32 [G, C].

        Only such cells vote; beyond the first and the last of them there is nothing.
        """
        n_kv, n_cells = cells.positions.shape
        older = (cells.positions >= 0) & (cells.positions <= cells.now - self.window)
        order = np.argsort(np.where(older, cells.positions, np.iinfo(np.int32).max), axis=-1)
        order = order[:, None]  # of all query heads of a KV head
        sums = np.where(older[:, None], window.sums.reshape(n_kv, -1, n_cells), np.float32(0))
        half = self.pool // 2
        padded = np.pad(np.take_along_axis(sums, order, -1), ((0, 0), (0, 0), (half, half)))
        pooled = padded[..., :n_cells].copy()
        for shift in range(1, self.pool):
            np.maximum(pooled, padded[..., shift : shift + n_cells], out=pooled)
        votes = np.empty((n_kv, n_cells), np.float32)
        np.put_along_axis(votes, order[:, 0], pooled.mean(1), -1)
        return votes


POLICY = SnapKV
