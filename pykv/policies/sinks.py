"""sinks: the first tokens and a window of the newest ones (StreamingLLM).

Source: Xiao et al. 2023, arXiv:2309.17453, section 3.2; mit-han-lab/streaming-llm
streaming_llm/kv_cache.py, class StartRecentKVCache. We differ: budget and sinks are set apart, the
window is what the sinks leave of the budget; a prompt is read token by token over the kept set,
where the reference attends to the whole prompt before it drops. Positions are places in the cache
as there: inside the window distances are the true ones anyway, so only the sinks are met by a query
that was turned to its own place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pykv.policies.base import I64, Cells, Policy, oldest


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Drops the oldest token that is no sink.  It has no settings."""

    name: ClassVar[str] = "sinks"
    endless: ClassVar[bool] = True
    places_sinks: ClassVar[bool] = True

    def recent_tokens(self, budget: int, sinks: int) -> int:
        """All that is kept beside the sinks."""
        return budget - sinks

    def drop(self, cells: Cells, count: int) -> I64:
        """The oldest `count` cells of every head.  Raises PolicyError: not even one would stay."""
        self._room(cells, count, 1)
        return oldest(cells.positions, count)


POLICY = StreamingLLM
