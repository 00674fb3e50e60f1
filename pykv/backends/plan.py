"""Chooses every kernel once, at load, and says what it chose.

A cache format without a kernel is refused in one sentence; a weight type without one is decoded at
load, with a warning that says what it costs.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from pykv import registry
from pykv.backends.base import F32, CacheFormats, WeightSource
from pykv.errors import UnsupportedError

log = logging.getLogger("pykv")


def has_format(name: str, role: str) -> bool:
    """Whether `formats` has a file for `name` with that role."""
    return name in registry.names("formats") and (
        role in registry.find("formats", name, "type").FORMAT.roles
    )


def decode(tensor: WeightSource) -> F32:
    """A tensor's values, f32 of its shape.  Raises UnsupportedError: nobody can decode the type."""
    if has_format(tensor.type, "weight"):
        format_ = registry.find("formats", tensor.type, "weight type").FORMAT
        values = format_.decode(tensor.data)
    else:
        values = _decode_with_gguf(tensor)
    return np.ascontiguousarray(values, np.float32).reshape(tensor.shape)


def _decode_with_gguf(tensor: WeightSource) -> F32:
    import gguf

    try:
        kind = gguf.GGMLQuantizationType[tensor.type.upper()]
        values: F32 = gguf.quants.dequantize(tensor.data, kind)
    except (KeyError, NotImplementedError) as error:
        raise UnsupportedError(
            f"{tensor.name} has type {tensor.type}, which neither pykv nor the gguf package can "
            "decode; requantise the model to a type such as Q4_K or Q8_0"
        ) from error
    return values


def cpu_module(name: str) -> ModuleType | None:
    """The CPU kernels of a type, or None."""
    return _module(name, "numba")


def _module(name: str, kind: str) -> ModuleType | None:
    full = f"pykv.kernels.{name}_{kind}"
    if importlib.util.find_spec(full) is None:
        return None
    return importlib.import_module(full)


def cpu_weight_module(tensor: WeightSource) -> ModuleType | None:
    """The CPU kernels that read a tensor where it lies; None: decode it (the warning is logged)."""
    module = cpu_module(tensor.type)
    if module is not None and hasattr(module, "unpack"):
        if tensor.shape[-1] % 32 == 0:
            return module
        reason = f"has rows of {tensor.shape[-1]} values, no multiple of 32"
    else:
        reason = f"has type {tensor.type}, for which there is no CPU kernel"
    _warn_decoded(tensor, reason)
    return None


def _warn_decoded(tensor: WeightSource, reason: str) -> None:
    cost = int(np.prod(tensor.shape)) * 4 / 2**20
    log.warning("%s %s: decoded to float32 at load, %.1f MiB", tensor.name, reason, cost)


def warn_clamped(layer: int, count: int) -> None:
    """Say that values were too large for the tail's type."""
    log.warning(
        "layer %d: %d keys or values beyond the range of the cache's tail were clamped; "
        "--kv-tail-type bf16 or f32 keeps them", layer, count,
    )  # fmt: skip


def has_gpu_weight(tensor: WeightSource) -> bool:
    """Whether GPU kernels read a tensor where it lies; else the warning is logged: decode it."""
    module = _module(tensor.type, "triton")
    if module is not None and hasattr(module, "weight"):
        if tensor.shape[-1] % module.BLOCK_LEN == 0:
            return True
        reason = f"has rows of {tensor.shape[-1]} values, no multiple of {module.BLOCK_LEN}"
    else:
        reason = f"has type {tensor.type}, for which there is no GPU kernel"
    _warn_decoded(tensor, reason)
    return False


def check_gpu_cache(formats: Sequence[CacheFormats]) -> None:
    """Raise UnsupportedError: a cache format has no GPU kernels."""
    for layer in set(formats):
        for name in (layer.page_k, layer.page_v, layer.tail_k, layer.tail_v):
            module = _module(name.partition(":")[0], "triton")
            if module is None or not hasattr(module, "KEY_AXIS"):
                raise UnsupportedError(
                    f"cache type {name} has no GPU kernels; use --device cpu, or another type"
                )


def cpu_cache_modules(formats: CacheFormats) -> dict[str, ModuleType]:
    """The CPU kernels of a cache's formats.  Raises UnsupportedError: one has none."""
    modules = {}
    for name in {formats.page_k, formats.page_v, formats.tail_k, formats.tail_v}:
        module = cpu_module(name.partition(":")[0])
        if module is None or not hasattr(module, "scores"):
            raise UnsupportedError(
                f"cache type {name} has no CPU kernels; use --device reference, or another type"
            )
        modules[name] = module
    return modules
