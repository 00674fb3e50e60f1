"""scissorhands: drops the tokens that queries looked past most often.

A cell counts the queries whose attention to it was below 1 / t, t being the tokens that they could
see. The largest count goes, of equal ones the oldest; a new token's count is 0.
Source: Liu et al. 2023, arXiv:2305.17118; as no code of the authors was found, the
defaults are those of AnswerDotAI/cold-compress cache.py, class KVCacheHeavyHitter with
attn_thresholding. We differ: the count fades, by 1 / history with every query, where the paper
counts over a window of the last 400; one count per KV head, of the mean over its query heads; sinks
are kept; every layer has the same budget, where the paper gives later layers more. How much is
dropped at once is not certain from what we read (half the budget is what we recall): here a tenth,
so that at least nine tenths of the budget are in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from pykv.errors import ConfigError
from pykv.policies.base import F32, I64, Cells, Policy, lowest


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Drops the tokens with the largest count of queries that paid them less than 1 / t.

    history: queries after which what was counted has faded to 1 / e, 1 or more.
    recent: newest tokens that are never dropped, 1 or more.
    at_once: share of the budget that is dropped when it is exceeded, 0 to 1; at least one token.
    """

    history: int = 400
    recent: int = 10
    at_once: float = 0.1

    name: ClassVar[str] = "scissorhands"
    needs: ClassVar[Literal["sums"]] = "sums"
    n_scores: ClassVar[int] = 1
    per_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._require(self.history >= 1, f"history must be 1 or more, not {self.history}")
        self._require(self.recent >= 1, f"recent must be 1 or more, not {self.recent}")
        self._require(0 <= self.at_once <= 1, f"at_once must be 0 to 1, not {self.at_once}")

    def check(self, budget: int, sinks: int) -> None:
        """Raises ConfigError: what is left after a drop does not hold sinks and recent tokens."""
        least = budget - self.count_to_drop(1, budget) + 1
        if least < sinks + self.recent:
            raise ConfigError(
                f"kv budget {budget} is too small for {self.name}, which goes down to {least} and "
                f"always keeps {sinks} sinks and {self.recent} recent tokens; give it more, or set "
                "fewer sinks"
            )

    def recent_tokens(self, budget: int, sinks: int) -> int:
        """As set, whatever the budget."""
        return self.recent

    def count_to_drop(self, over: int, budget: int) -> int:
        """The share of the budget, or what is above it where that is more."""
        return max(over, int(self.at_once * budget))

    def observe(self, cells: Cells, probs: F32) -> None:
        """Lets the counts fade, and adds 1 where the group's mean is below 1 / n_kept."""
        scores = cells.scores[0]
        scores *= np.float32(1 - 1 / self.history)
        scores += probs < np.float32(cells.group / cells.n_kept)

    def drop(self, cells: Cells, count: int) -> I64:
        """The cells with the largest counts.  Raises PolicyError: too few outside the recent."""
        self._room(cells, count, self.recent)
        last = cells.now - self.recent
        return lowest(cells.scores[0], cells.positions, last, count, largest=True)


POLICY = Scissorhands
