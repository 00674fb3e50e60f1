"""What a run reports about itself: times, rates, bytes, and the choices that were made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Finish = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True)
class Stats:
    """One generation in numbers; `to_dict` is what `--json` prints.

    `finish` says why it ended: "stop" (an end-of-generation token or a stop string), "length"
    (max_tokens), "context" (no room left) or "cancelled"; None while it runs.
    """

    prompt_tokens: int = 0  # tokens of the prompt, the reused ones included
    cached_tokens: int = 0  # of those, tokens that an earlier turn had left in the cache
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generated_seconds: float = 0.0
    load_seconds: float = 0.0
    compile_seconds: float = 0.0
    cache_bytes: int = 0  # in use: scales, tables, tail, sinks and partly filled pages included
    cache_reserved_bytes: int = 0  # what the pools hold
    cache_peak_bytes: int = 0  # most in use after any batch, where a policy drops tokens; else 0
    cache_f16_bytes: int = 0  # what the same tokens would take as plain f16
    weight_bytes: int = 0
    threads: int = 0
    seed: int = 0
    plan: tuple[str, ...] = ()  # which kernels were chosen, one sentence each
    finish: Finish | None = None

    @property
    def read_tokens(self) -> int:
        """Prompt tokens that were really computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_tps(self) -> float:
        """Computed prompt tokens per second; 0 when nothing was computed."""
        return self.read_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def generated_tps(self) -> float:
        """Generated tokens per second; 0 when nothing was generated."""
        return self.generated_tokens / self.generated_seconds if self.generated_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and the rates, as plain JSON values."""
        values = asdict(self)
        values["plan"] = list(self.plan)
        values["prompt_tokens_per_second"] = self.prompt_tps
        values["generated_tokens_per_second"] = self.generated_tps
        return values
