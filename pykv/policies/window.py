"""window: the newest `budget` tokens and nothing else, the start of the text included.

The plain sliding window that StreamingLLM is measured against: it shows what losing the first
tokens costs. Distances never exceed the budget, so text may run past the context.
Source: Xiao et al. 2023, arXiv:2309.17453, section 3.1, "window attention". We differ: a prompt is
read token by token too, where the reference attends to the whole prompt before it drops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pykv.policies.base import I64, Cells, Policy, oldest


@dataclass(frozen=True)
class Newest(Policy):
    """Drops the oldest token.  It has no settings, and keeps no sinks."""

    name: ClassVar[str] = "window"
    endless: ClassVar[bool] = True
    keeps_sinks: ClassVar[bool] = False

    def recent_tokens(self, budget: int, sinks: int) -> int:
        """All that is kept."""
        return budget

    def drop(self, cells: Cells, count: int) -> I64:
        """The oldest `count` cells of every head.  Raises PolicyError: not even one would stay."""
        self._room(cells, count, 1)
        return oldest(cells.positions, count)


POLICY = Newest
