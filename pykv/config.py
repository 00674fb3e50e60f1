"""Every knob of pykv, in three frozen dataclasses; the CLI declares its flags from them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from pykv.errors import ConfigError

_LAYERS = re.compile(r"[0-9]{1,9}")


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

    type_k, type_v: the type of keys and of values in full pages, a name that `pykv inspect` lists;
        nuq types take an option, "nuq3:outliers=1%".
    sinks: tokens at the start of a sequence that stay exact, 0 to 64; nuq types need 4.
    residual: newest tokens that stay exact, 0 to 65,536; None: the larger default of the two types.
    tail_type: the type of exact tokens, f16, bf16 or f32; None: f16, or bf16 or f32 beside pages of
        that type.
    transform_k, transform_v: a map of full pages, by head: none, hadamard, random, lowrank:R, which
        keeps R channels; auto: what suits the type.
    position: when RoPE turns the keys. write: before they are stored; read: afterwards, which f32,
        f16, bf16, kivi and nuq keys can do; nuq keys always do.
    override: types of some layers, the first layer being 0: "0-1=k:q8_0,v:q8_0;5=k:f16"; of two
        that name a layer the later one counts.
    policy: which tokens are kept, by name and settings: full, window, sinks, h2o, scissorhands,
        snapkv, fastgen; "h2o:recent=0.5".
    budget: tokens that a policy keeps of each KV head, sinks included: "1024", or "20%" of those
        seen so far, at least 64.
    guard: on: layers whose keys type_k would spoil keep q8_0 or f16 keys; off: all as set.
    Raises ConfigError: a number out of range, a guard that is neither. Names of types, transforms
    and positions are checked when a model is loaded.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    sinks: int = 4
    residual: int | None = None
    tail_type: str | None = None
    transform_k: str = "auto"
    transform_v: str = "auto"
    position: str = "write"
    override: str | None = None
    guard: str = "on"
    policy: str = "full"
    budget: str | None = None

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
    """How a model is loaded and run.

    device: auto, a GPU where there is one; cpu, cuda, or reference, which is plain NumPy and slow.
    gpu_layers: auto; all or more than the model has: the whole model on the GPU; 0: on the CPU.
    threads: CPU threads, 1 to 1,024; None: the physical cores, within affinity and cgroup quota.
    ctx_size: most tokens of a sequence; 0: what the model was trained for.
    batch: most tokens of a call of the model; the smaller one of batch and ubatch counts.
    ubatch: most tokens that go through the layers together.
    deterministic: the same logits for every split into batches, and whatever was cached; prompts
        are read at about a third of the speed.
    check_memory: refuse to load what does not fit the free memory.
    chat_template: a built-in template's name, a file or Jinja source; None: the model's own.
    Raises ConfigError: a number out of range. Devices are checked when a model is loaded.
    """

    device: str = "auto"
    gpu_layers: str = "auto"
    threads: int | None = None
    ctx_size: int = 0
    batch: int = 2048
    ubatch: int = 512
    deterministic: bool = False
    check_memory: bool = True
    chat_template: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self.gpu_layers in ("auto", "all", "-1") or bool(_LAYERS.fullmatch(self.gpu_layers)),
            f"n-gpu-layers must be auto, all or a number of layers, not '{self.gpu_layers}'",
        )
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

    None means: the model file's `general.sampling.*` value, if it has one, else llama.cpp's
    default, which is given in brackets. Numbers have no unit; probabilities are shares of 1.

    temperature: divides the logits (0.8); 0 or less: greedy.
    top_k: likeliest tokens that are kept (40); 0 or less: all.
    top_p: likeliest tokens that are kept, by the sum of their probabilities (0.95); 1 or more: off.
    min_p: least probability, as a share of the largest (0.05); 0 or less: off.
    typical_p: share of locally typical tokens that is kept (1.0, which is off).
    repeat_last_n: tokens that penalties look back on (64); 0: off, -1: the whole context.
    repeat_penalty: divides or multiplies logits of tokens that occurred (1.0, which is off).
    presence_penalty: is taken from logits of tokens that occurred (0.0).
    frequency_penalty: is taken from them once for each occurrence (0.0).
    seed: 0 to 2**32 - 1; None or -1: drawn afresh, and told in the result's stats.
    ignore_eos: end-of-generation tokens are never chosen.
    Raises ConfigError: a value of another type. Ranges are checked when a generation is made.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
