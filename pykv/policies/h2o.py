"""h2o: the tokens that have drawn most attention so far, and the newest ones (heavy hitters).

A cell's score is the attention of all queries since its token came, its own included; scores of
those that stay go on. The smallest goes, of equal ones the oldest.
Source: Zhang et al. 2023, arXiv:2306.14048, algorithm 1; FMInference/H2O
h2o_hf/utils_real_drop/modify_llama.py. We differ: one list per KV head, from attention summed over
its query heads, where the paper knows one query head per KV head; sinks are kept whatever they
score; the recent part is exact, where the simulation of the reference hides its oldest token for a
step; the budget is one number, of which `recent` is a share, and it holds while a prompt is read,
unless `prompt=full`: then the prompt is read whole and reduced once, as in the paper's experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pykv.policies.base import F32, I64, Cells, Policy, lowest


@dataclass(frozen=True)
class H2O(Policy):
    """Drops the token with the least attention outside the newest ones.

    recent: share of the budget that goes to the newest tokens, 0 to 1; at least one token.
    prompt: tokens: the budget holds after every token; full: prompts are read whole, then reduced.
    """

    recent: float = 0.5
    prompt: str = "tokens"

    name: ClassVar[str] = "h2o"
    needs: ClassVar[Literal["sums"]] = "sums"
    n_scores: ClassVar[int] = 1
    per_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._require(0 <= self.recent <= 1, f"recent must be 0 to 1, not {self.recent}")
        known = ("tokens", "full")
        self._require(self.prompt in known, f"prompt must be tokens or full, not '{self.prompt}'")

    @property
    def whole_prompts(self) -> bool:
        """As `prompt` says."""
        return self.prompt == "full"

    def recent_tokens(self, budget: int, sinks: int) -> int:
        """The share of the budget, rounded down, at least 1."""
        return max(1, int(self.recent * budget))

    def observe(self, cells: Cells, probs: F32) -> None:
        """Adds up attention."""
        scores = cells.scores[0]
        scores += probs

    def drop(self, cells: Cells, count: int) -> I64:
        """The cells with the least attention.  Raises PolicyError: too few outside the recent."""
        recent = self.recent_tokens(cells.n_kept - count, cells.sinks)
        self._room(cells, count, recent)
        return lowest(cells.scores[0], cells.positions, cells.now - recent, count)


POLICY = H2O
