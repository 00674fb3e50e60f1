"""Which formats a cache's pages have, how large its pages are, and how many tokens stay exact."""

from __future__ import annotations

from collections.abc import Sequence

from pykv import registry
from pykv.backends.base import PAGE, CacheFormats, LayerShape
from pykv.config import CacheConfig
from pykv.errors import ConfigError

TAIL_TYPES = ("f16", "bf16", "f32")
SIDES = ("key", "value")


def formats_of(config: CacheConfig) -> CacheFormats:
    """The formats of a layer's pages and tails.

    Raises ConfigError: a cache type or a tail type that is none.
    """
    tails = []
    for name in (config.type_k, config.type_v):
        if not _is_cache_type(name):
            known = [n for n in registry.names("formats") if _is_cache_type(n)]
            raise ConfigError(f"unknown cache type '{name}': it is one of {', '.join(known)}")
        if config.tail_type is not None and config.tail_type not in TAIL_TYPES:
            raise ConfigError(
                f"kv tail type '{config.tail_type}' is unknown; "
                f"it is one of {', '.join(TAIL_TYPES)}"
            )
        tails.append(config.tail_type or (name if name in ("f32", "bf16") else "f16"))
    return CacheFormats(config.type_k, config.type_v, *tails)


def _is_cache_type(name: str) -> bool:
    return name in registry.names("formats") and (
        "cache" in registry.find("formats", name, "cache type").FORMAT.roles
    )


def residual_of(config: CacheConfig) -> int:
    """Newest tokens that stay exact: the flag, or the larger of the two formats' defaults."""
    if config.residual is not None:
        return config.residual
    residuals: list[int] = [
        registry.find("formats", name, "cache type").FORMAT.residual
        for name in (config.type_k, config.type_v)
    ]
    return max(residuals)


def page_sizes(
    shapes: Sequence[LayerShape], formats: CacheFormats, sinks: int
) -> dict[tuple[str, int], list[tuple[int, list[int]]]]:
    """(kind of page, side) -> page bytes, and the layers whose pages have them.

    Kinds are "page", "tail" and "sinks"; sides 0 for keys, 1 for values.
    """
    sizes: dict[tuple[str, int], list[tuple[int, list[int]]]] = {}
    page, tail = (formats.page_k, formats.page_v), (formats.tail_k, formats.tail_v)
    slots = {"page": PAGE, "tail": PAGE, "sinks": (sinks + 15) // 16 * 16}
    for kind, pair in (("page", page), ("tail", tail), ("sinks", tail)):
        for side in (0, 1):
            format_ = registry.find("formats", pair[side], "cache type").FORMAT
            by_size: dict[int, list[int]] = {}
            for layer, shape in enumerate(shapes):
                if slots[kind]:
                    d = (shape.d_k, shape.d_v)[side]
                    n_bytes = format_.page_bytes(d, SIDES[side], slots[kind])
                    by_size.setdefault(n_bytes, []).append(layer)
            sizes[kind, side] = list(by_size.items())
    return sizes
