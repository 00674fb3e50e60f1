"""The values that a sampler uses: the user's, else the model file's, else llama.cpp's defaults.

Source: llama.cpp common/common.h, common_params_sampling; GGUF keys general.sampling.*.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pykv.config import SamplingConfig
from pykv.errors import ConfigError, GGUFError

_LOG = logging.getLogger("pykv")

_KEYS = {  # field of SamplingConfig -> key under general.sampling. (None: no key), default
    "temperature": ("temp", 0.8),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.95),
    "min_p": ("min_p", 0.05),
    "typical_p": (None, 1.0),
    "repeat_last_n": ("penalty_last_n", 64),
    "repeat_penalty": ("penalty_repeat", 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
}
# keys that ask for a step that this chain does not have, and the value that switches it off
_FOREIGN = {"sequence": "", "xtc_probability": 0, "mirostat": 0}


@dataclass(frozen=True)
class SamplerSettings:
    """Every sampling value that a run really used, the seed included."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int

    @property
    def penalises(self) -> bool:
        """Whether any penalty changes logits."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def settle(config: SamplingConfig, metadata: Mapping[str, object]) -> SamplerSettings:
    """The user's values, else the model file's, else llama.cpp's defaults; a seed in any case.

    Raises ConfigError for a value of the user's that makes no sense, GGUFError for one of the
    file's.
    """
    values: dict[str, float] = {}
    for field, (key, default) in _KEYS.items():
        value = getattr(config, field)
        name = f"general.sampling.{key}"
        if value is not None:
            values[field] = _checked(field, value, type(default))
        elif key is not None and name in metadata:
            values[field] = _from_file(field, name, metadata[name], type(default))
        else:
            values[field] = default
    for key, off in _FOREIGN.items():
        found = metadata.get(f"general.sampling.{key}", off)
        if found != off:
            _LOG.warning(
                "the model asks for general.sampling.%s = %s, which pykv does not have; ignored",
                key,
                found,
            )
    seed = config.seed
    if seed is None or seed == -1:
        seed = secrets.randbits(32)
    elif not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be -1 (a fresh one) or 0 to {2**32 - 1}, not {seed}")
    return SamplerSettings(**values, seed=seed)  # type: ignore[arg-type]


def _from_file(field: str, name: str, value: object, kind: type) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise GGUFError(f"{name} is {value!r}, where a number was expected")
    try:
        return _checked(field, float(value), kind)
    except ConfigError as error:
        raise GGUFError(f"{name}: {error}") from error


def _checked(field: str, value: float, kind: type) -> float:
    name = field.replace("_", "-")
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value}")
    if field == "repeat_penalty" and value <= 0:
        raise ConfigError(f"{name} must be more than 0 (1 is off), not {value}")
    if field == "repeat_last_n" and value < -1:
        raise ConfigError(f"{name} must be -1 (all), 0 (off) or a count of tokens, not {value}")
    number: float = kind(value)
    return number
