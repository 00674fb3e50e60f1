"""What the figures of cached types must reach, by model, size and type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.report import Bar

Key = tuple[Any, ...]

# decoding against llama.cpp with the same types
DECODE_PEER = {
    ("smollm2", 4096, "f16"): 2.0,
    ("smollm2", 4096, "q8_0"): 3.0,
    ("smollm2", 4096, "q4_0"): 4.0,
}
# decoding against our own f16 at these depths, whatever the model
DECODE_DEPTHS = (4096, 8000)
FASTER = ("q8_0", "q4_0", "fp8_e4m3", "fp8_e5m2")
NO_SLOWER = ("kivi2",)

PROMPT, PROMPT_LENGTHS = 0.85, (512, 4096)
POSITION = {(4096, "nuq4"): 0.5}

KERNEL, KERNEL_TOKENS, KERNEL_TYPES = 1.7, 65536, ("f16", "q8_0", "q4_0", "kivi2")

BYTES = {
    ("smollm2", 4096, "q8_0"): 0.56,
    ("smollm2", 4096, "q4_0"): 0.32,
    ("smollm2", 4096, "kivi2"): 0.24,
    ("gemma3", 4096, "q8_0"): 0.58,
    ("gemma3", 4096, "q4_0"): 0.38,
    ("gemma3", 4096, "kivi2"): 0.34,
}

# percent of perplexity over our own f16, by (chunks, tokens of a chunk)
PERPLEXITY: dict[Key, dict[str, float]] = {
    ("smollm2", (16, 512)): {
        "q8_0": 0.1, "int8": 0.1,
        "q5_1": 0.4, "q5_0": 0.4, "iq4_nl": 0.4, "kivi4": 0.4, "fp8_e4m3": 0.4, "fp8_e5m2": 0.4,
        "q4_0": 0.6, "q4_1": 0.6, "tq4": 0.6,
        "kivi3": 1.0, "tq3": 1.5, "kivi4/kivi2": 1.0, "kivi2": 7.0,
        "nuq4": 1.0, "nuq3": 2.0,
    },
    ("smollm2", (4, 2048)): {"q4_0": 1.5, "kivi4": 0.6, "kivi3": 2.0, "kivi2": 20.0},
    ("gemma3", (16, 512)): {"q4_0": 1.5, "kivi2": 2.0, "kivi3": 0.5},
}  # fmt: skip
KLD_CHUNKS = 8  # of 512 tokens
KLD = {
    ("smollm2", 512, "q8_0"): 0.0003,
    ("smollm2", 512, "fp8_e4m3"): 0.002,
    ("smollm2", 512, "q4_0"): 0.006,
    ("smollm2", 512, "kivi4"): 0.003,
    ("smollm2", 512, "kivi3"): 0.012,
    ("smollm2", 512, "kivi2"): 0.10,
}


def at_least(limits: Mapping[Key, float], *key: Any) -> Bar | None:
    """The bar of a ratio, where there is one."""
    return Bar("≥", limits[key]) if key in limits else None


def at_most(limits: Mapping[Key, float], *key: Any, of: str = "ratio") -> Bar | None:
    """The same for what must not be larger."""
    return Bar("≤", limits[key], of) if key in limits else None


def beside_f16(depth: int, cache_type: str) -> Bar | None:
    """Of decoding against our own f16."""
    if depth not in DECODE_DEPTHS:
        return None
    if cache_type in FASTER:
        return Bar(">", 1.0)
    return Bar("≥", 1.0) if cache_type in NO_SLOWER else None


def perplexity(model: str, chunks: tuple[int, int], cache_type: str) -> Bar | None:
    """Of the ratio of perplexities."""
    percent = PERPLEXITY.get((model, chunks), {}).get(cache_type)
    return None if percent is None else Bar("≤", 1 + percent / 100)
