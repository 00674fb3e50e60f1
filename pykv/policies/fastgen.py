"""fastgen: after a prompt, a class of policy for each head: the smallest that keeps its attention.

Classes, each with all of the one before: special tokens; + punctuation; + frequent, the cells with
most attention; + local, the newest cells; full. A head gets the first whose cells held on average
at least `recovery` of the last queries' attention; sinks belong to every class.
Source: Ge et al. 2023, arXiv:2310.01801, section 3; AnswerDotAI/cold-compress cache.py, class
KVCacheHybrid (the authors' code was not to be had). We differ: recovery is the attention that kept
cells held, as in cold-compress, where the paper compares with attention taken anew over them: the
two rank alike, their thresholds are not the same numbers. It is taken over the last `window`
queries, not all. Shares are of the tokens kept so far, as in the paper. One class per KV head, of
the mean over its query heads. It acts once, at the prompt's end: the paper goes on to drop while
tokens are generated, which is not done here, so what is generated stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pykv.policies.base import I32, I64, PUNCTUATION, SPECIAL, Bool, Cells, Policy, Window

CLASSES = ("special", "punctuation", "frequent", "local", "full")


@dataclass(frozen=True)
class FastGen(Policy):
    """Keeps, when a prompt ends, what the cheapest sufficient class of each head keeps.

    recovery: share of the attention that a class must have held, 0 to 1.
    frequent, local: shares of the tokens kept so far that these classes keep, 0 to 1.
    window: queries whose attention is looked at, 1 to 512.
    """

    recovery: float = 0.95
    frequent: float = 0.3
    local: float = 0.3
    window: int = 64

    name: ClassVar[str] = "fastgen"
    moment: ClassVar[Literal["prompt"]] = "prompt"
    needs: ClassVar[Literal["window"]] = "window"
    per_head: ClassVar[bool] = True
    takes_budget: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for setting in ("recovery", "frequent", "local"):
            value = getattr(self, setting)
            self._require(0 <= value <= 1, f"{setting} must be 0 to 1, not {value}")
        self._require(1 <= self.window <= 512, f"window must be 1 to 512, not {self.window}")

    @property
    def n_queries(self) -> int:
        """The window."""
        return self.window

    def check(self, budget: int, sinks: int) -> None:
        """Nothing: there is no budget."""

    def recent_tokens(self, budget: int, sinks: int) -> int:
        """The newest token alone: a head may keep special tokens only."""
        return 1

    def select(self, cells: Cells, window: Window, budget: int) -> Bool:
        """What each head's class keeps, [G, C], and the newest token; there is no budget."""
        kept = self._kept(cells, window)  # [classes, G, C]
        chosen = self._chosen(cells, window, kept)
        own = np.take_along_axis(kept, chosen[None, :, None], 0)[0]
        stay: Bool = own | (cells.positions == cells.now)
        return stay

    def profile(self, cells: Cells, window: Window) -> I64:
        """The class of each KV head, a place in CLASSES, i64 [G]."""
        return self._chosen(cells, window, self._kept(cells, window))

    def kinds(self, cells: Cells, window: Window) -> list[str]:
        """The class of each KV head in a word."""
        return [CLASSES[i] for i in self.profile(cells, window)]

    def _chosen(self, cells: Cells, window: Window, kept: Bool) -> I64:
        n_kv, n_cells = cells.positions.shape
        paid = window.sums.reshape(n_kv, -1, n_cells).mean(1)  # [G, C]
        # counted from what is lost, since the sinks' share is what is missing from the sums
        lost = np.where(kept, np.float32(0), paid).sum(-1) / np.float32(window.n_queries)
        first: I64 = (lost <= 1 - self.recovery).argmax(0)  # `full` loses nothing
        return first

    def _kept(self, cells: Cells, window: Window) -> Bool:
        """What each class keeps of each head, [classes, G, C]."""
        places = cells.positions
        n_kv, n_cells = places.shape
        live = places >= 0
        special = live & (window.classes == SPECIAL)
        punctuation = special | live & (window.classes == PUNCTUATION)
        # per query that could see the cell, so that the newest are not at a loss
        seen_by = np.clip(cells.now - places + 1, 1, window.n_queries)
        score = window.sums.reshape(n_kv, -1, n_cells).mean(1) / seen_by
        frequent = punctuation | live & _top(
            np.where(live, score, -1), places, cells, self.frequent
        )
        local = frequent | live & _top(places, places, cells, self.local)
        return np.stack([special, punctuation, frequent, local, live])


def _top(scores: npt.NDArray[Any], places: I32, cells: Cells, share: float) -> Bool:
    """The highest scores of each head, as many as the share of its tokens; then the newest."""
    order = np.lexsort((places, scores), axis=-1)
    n = min(int(share * cells.n_kept), scores.shape[-1])
    top = np.zeros(scores.shape, bool)
    np.put_along_axis(top, order[..., scores.shape[-1] - n :], True, -1)
    return top


POLICY = FastGen
