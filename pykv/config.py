"""Every knob of pykv, in three frozen dataclasses; the CLI declares its flags from them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pykv.errors import ConfigError


def _check(ok: bool, sentence: str) -> None:
    if not ok:
        raise ConfigError(sentence)


def _check_types(settings: Any) -> None:
    """Each field must hold what its annotation says; an int passes for a float."""
    kinds = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    for field in fields(settings):
        kind, _, optional = str(field.type).partition(" | ")
        value = getattr(settings, field.name)
        fits = isinstance(value, kinds[kind]) and (kind == "bool" or not isinstance(value, bool))
        if not (fits or (optional == "None" and value is None)):
            raise ConfigError(f"{field.name} must be of type {field.type}, not {value!r}")


@dataclass(frozen=True)
class CacheConfig:
    """How keys and values are kept.

    Raises ConfigError for a value out of range; unknown type names are refused at load.
    """

    type_k: str = "f16"  # format of key pages
    type_v: str = "f16"  # format of value pages
    sinks: int = 4  # tokens at the start of a sequence that are never encoded
    residual: int | None = None  # newest tokens kept exact; None: the formats' default
    tail_type: str | None = None  # f32, f16 or bf16; None: f16, or the page's own wider type
    transform_k: str = "auto"  # of key pages: none, hadamard, random, or the format's own
    transform_v: str = "auto"  # of value pages
    position: str = "write"  # when RoPE turns keys: write, or read (f32, f16, bf16 and kivi)
    override: str | None = None  # other types for some layers: "0-1=k:q8_0,v:q8_0;5=k:f16"
    guard: str = "on"  # on: layers whose keys the type would spoil keep a safe one; off: all as set

    def __post_init__(self) -> None:
        _check_types(self)
        _check(0 <= self.sinks <= 64, f"kv sinks must be 0 to 64 tokens, not {self.sinks}")
        _check(self.guard in ("on", "off"), f"kv guard must be on or off, not '{self.guard}'")
        if self.residual is not None:
            _check(
                0 <= self.residual <= 65536,
                f"kv residual must be 0 to 65536 tokens, not {self.residual}",
            )


@dataclass(frozen=True)
class LoadConfig:
    """How a model is loaded and run.  Raises ConfigError for a value out of range."""

    device: str = "auto"  # auto, cpu, or reference (plain NumPy, slow)
    threads: int | None = None  # None: physical cores, within affinity and cgroup quota
    ctx_size: int = 0  # tokens; 0: what the model was trained for
    batch: int = 2048  # tokens a call may hand over at once
    ubatch: int = 512  # tokens that go through the layers together
    deterministic: bool = False  # same logits for every batch split, at the price of speed
    check_memory: bool = True  # refuse to load what does not fit the free memory
    chat_template: str | None = None  # a built-in name or a file, in place of the model's own

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self.threads is None or 1 <= self.threads <= 1024,
            f"threads must be 1 to 1024, not {self.threads}",
        )
        _check(self.ctx_size >= 0, f"ctx-size must be 0 or more tokens, not {self.ctx_size}")
        _check(self.batch >= 1, f"batch-size must be 1 or more tokens, not {self.batch}")
        _check(self.ubatch >= 1, f"ubatch-size must be 1 or more tokens, not {self.ubatch}")


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen, with llama.cpp's chain.

    None means: the model file's `general.sampling.*` value, else llama.cpp's default, which the
    comment gives.  Raises ConfigError for a value out of range.
    """

    temperature: float | None = None  # 0.8; 0 or less: greedy
    top_k: int | None = None  # 40; 0 or less: all tokens
    top_p: float | None = None  # 0.95; 1 or more: off
    min_p: float | None = None  # 0.05; 0 or less: off
    typical_p: float | None = None  # 1.0: off
    repeat_last_n: int | None = None  # 64 tokens back; 0: off, -1: the whole context
    repeat_penalty: float | None = None  # 1.0: off
    presence_penalty: float | None = None  # 0.0: off
    frequency_penalty: float | None = None  # 0.0: off
    seed: int | None = None  # None or -1: drawn afresh, and part of the result
    ignore_eos: bool = False  # never end by itself

    def __post_init__(self) -> None:
        _check_types(self)
