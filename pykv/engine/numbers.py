"""What calibration files say of a cache's layers, as the store and the backends take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pykv.backends.base import CacheFormats, LayerShape
from pykv.backends.transforms import LOWRANK
from pykv.engine import calibration
from pykv.engine.calibration import Calibration, Side
from pykv.formats.coded import HeadNumbers
from pykv.formats.coded import find as cache_format
from pykv.gguf import GGUFFile

Numbers = list[tuple[list[HeadNumbers], list[HeadNumbers]]]


def of_cache(
    file: GGUFFile, path: Path, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]
) -> Numbers:
    """Per layer, for keys and for values, the numbers of each KV head; [] where nothing needs any.

    Raises ConfigError: a type needs a calibration that is not there, or was made for another model;
    GGUFError: it is damaged.
    """
    wanted = {name for f in formats for name in _wanted(f)}
    if not wanted:
        return []
    owner = calibration.identity(file, shapes)
    found: dict[str, Calibration | None] = {}
    for name in sorted(wanted):
        optional = name != calibration.LOWRANK and cache_format(name).calibration == "scale"
        found[name] = (
            calibration.find(name, owner) if optional else calibration.require(name, owner, path)
        )
    layers: Numbers = []
    for layer, (shape, names) in enumerate(zip(shapes, formats, strict=True)):
        keys = _heads(found, layer, "key", shape.n_kv, names.page_k, names.transform_k)
        values = _heads(found, layer, "value", shape.n_kv, names.page_v, names.transform_v)
        layers.append((keys, values))
    return layers


def _wanted(formats: CacheFormats) -> list[str]:
    """Types, and `lowrank`, whose calibration a layer asks for."""
    names = [
        name
        for name in (formats.page_k, formats.page_v)
        if cache_format(name).calibration != "none"
    ]
    if any(t.startswith(LOWRANK) for t in (formats.transform_k, formats.transform_v)):
        names.append(calibration.LOWRANK)
    return names


def _heads(
    found: dict[str, Calibration | None],
    layer: int,
    side: Side,
    n_kv: int,
    name: str,
    transform: str,
) -> list[HeadNumbers]:
    # a head's scale was measured on what no transform had turned
    turned = transform != "none" and cache_format(name).calibration == "scale"
    own = None if turned else found.get(name)
    heads = [HeadNumbers() if own is None else own.numbers(layer, side, h) for h in range(n_kv)]
    bases = found.get(calibration.LOWRANK) if transform.startswith(LOWRANK) else None
    if bases is not None:
        basis = bases.layers[layer][f"{side[0]}_basis"]
        heads = [replace(head, basis=basis[h]) for h, head in enumerate(heads)]
    return heads
