"""The devices that a model runs on, and their backends."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv.backends.base import Backend
from pykv.config import LoadConfig, SamplingConfig
from pykv.engine import hub
from pykv.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from pykv.engine.model import Model

log = logging.getLogger("pykv")

DEVICES = ("cpu", "cuda", "reference")
# what a GPU's driver puts in the file system; without one torch, which loads slowly, is not asked
NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
EXTRA = ("torch", "triton")  # what the extra `gpu` installs
MANY = 1 << 30  # more layers than any model has
PROMPT = 16  # tokens of the prompt that is read at load: more than go through decoding's kernels
COMPILING = "compiling kernels; they are kept for later runs"
LoadProgress = Callable[[str, int, int], None]  # stage, done, of


def backend(config: LoadConfig, n_layer: int, progress: LoadProgress | None) -> Backend:
    """The backend of `config.device`; `progress` as `pykv.load` has it.

    Raises ConfigError: there is no such device, or a part of the n_layer layers is wanted on it;
    UnsupportedError: no GPU can be used.
    """
    if config.device not in ("auto", *DEVICES):
        raise ConfigError(
            f"device '{config.device}' is unknown: it is auto, {', '.join(DEVICES[:-1])} or "
            f"{DEVICES[-1]}"
        )
    device = _device(config, n_layer)
    settings: dict[str, Any] = {}
    if device == "cpu":
        settings = {
            "threads": config.threads,
            "deterministic": config.deterministic,
            "progress": _compiling(progress),
            "kernel_cache": hub.cache_dir(),
        }
    elif device == "cuda":
        settings = {"deterministic": config.deterministic, "progress": _compiling(progress)}
    made: Backend = _module(device).create(**settings)
    return made


def warm_up(model: Model) -> None:
    """Read a short prompt and decode where kernels are compiled and steps captured when first met.

    So that a first answer waits for few of them, and decoding's buffers are there.
    """
    if not model.dev.warms_up or model.n_ctx < PROMPT + 2:
        return
    sequence, greedy = model.store.new_sequence(), model.sampler(SamplingConfig(temperature=0))
    try:
        for n in (PROMPT, 1, 1):
            model.draw((sequence, np.zeros(n, np.int32)), greedy)
    finally:
        model.store.free(sequence)


def _wanted(gpu_layers: str) -> int | None:
    """Layers that are to be on a GPU; None: all where there is one."""
    if gpu_layers == "auto":
        return None
    return MANY if gpu_layers in ("all", "-1") else int(gpu_layers)


def _device(config: LoadConfig, n_layer: int) -> str:
    """The device by its name.  Raises ConfigError, UnsupportedError."""
    wanted, device = _wanted(config.gpu_layers), config.device
    if device == "cuda" and wanted == 0:
        raise ConfigError("--device cuda and -ngl 0 contradict each other: leave one out")
    if device in ("cpu", "reference") or wanted == 0:
        if wanted:
            log.warning("-ngl (gpu_layers) has no effect on --device %s", device)
        return "cpu" if device == "auto" else device
    missing: str | None = "there is none"
    if device == "cuda" or any(os.path.exists(node) for node in NODES):
        missing = _missing()
    if missing and device == "cuda":
        raise UnsupportedError(f"--device cuda: no GPU can be used: {missing}")
    if missing:
        if wanted:
            log.warning("no GPU can be used (%s): -ngl (gpu_layers) has no effect", missing)
        return "cpu"
    if wanted is not None and wanted <= n_layer:
        raise ConfigError(
            f"-ngl {wanted}: this model has {n_layer} layers and the output, and pykv puts all of "
            f"them on the GPU or none; use all, {n_layer + 1} or more, or 0"
        )
    return "cuda"


def _missing() -> str | None:
    """Why no GPU can be used, or None."""
    for part in EXTRA:
        if importlib.util.find_spec(part) is None:
            return f"{part} is not installed; pip install 'pykv[gpu]'"
    try:
        missing: str | None = _module("cuda").missing()
    except (ImportError, OSError) as error:  # a library that torch or triton wants is not here
        return f"torch or triton cannot be imported: {error}"
    return missing


def _module(device: str) -> ModuleType:
    return importlib.import_module(f"pykv.backends.{device}")


def _compiling(progress: LoadProgress | None) -> Callable[[str], None]:
    """What to call with each kernel that is compiled."""
    seen: list[str] = []

    def compiling(kernel: str) -> None:
        seen.append(kernel)
        if progress is not None:
            progress(COMPILING, len(seen), 0)
        elif len(seen) == 1:
            log.info(COMPILING)

    return compiling
