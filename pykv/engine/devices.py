"""The devices that a model runs on, and their backends."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from pykv.backends.base import Backend
from pykv.config import LoadConfig
from pykv.engine import hub
from pykv.errors import ConfigError

log = logging.getLogger("pykv")

DEVICES = ("cpu", "reference")
COMPILING = "compiling kernels; they are kept for later runs"
LoadProgress = Callable[[str, int, int], None]  # stage, done, of


def backend(config: LoadConfig, progress: LoadProgress | None) -> Backend:
    """The backend of `config.device`; `progress` as `pykv.load` has it.

    Raises ConfigError: there is no such device.
    """
    device = "cpu" if config.device == "auto" else config.device
    if device not in DEVICES:
        raise ConfigError(
            f"device '{config.device}' is unknown: it is auto, {' or '.join(DEVICES)}"
        )
    seen: list[str] = []

    def compiling(kernel: str) -> None:
        seen.append(kernel)
        if progress is not None:
            progress(COMPILING, len(seen), 0)
        elif len(seen) == 1:
            log.info(COMPILING)

    settings: dict[str, Any] = {}
    if device == "cpu":
        settings = {
            "threads": config.threads,
            "deterministic": config.deterministic,
            "progress": compiling,
            "kernel_cache": hub.cache_dir(),
        }
    made: Backend = importlib.import_module(f"pykv.backends.{device}").create(**settings)
    return made
