"""Which formats a cache's pages have, how large its pages are, and how many tokens stay exact."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykv import registry
from pykv.backends import latent, transforms
from pykv.backends.base import PAGE, CacheFormats, LayerShape
from pykv.config import CacheConfig
from pykv.errors import ConfigError
from pykv.formats.base import Side
from pykv.formats.coded import find
from pykv.policies import base as policies
from pykv.policies.base import Budget, Policy

TAIL_TYPES = ("f16", "bf16", "f32")
LEAST_SINKS = 4  # tokens that a calibration leaves out; see engine/calibrate.py
SIDES: tuple[Side, Side] = ("key", "value")
_TYPE = r"(\w+(?::\w+=[0-9.]+%)?)"
_OVERRIDE = re.compile(rf"([0-9]+)(?:-([0-9]+))?=(?:k:{_TYPE})?(,?)(?:v:{_TYPE})?")


@dataclass(frozen=True, eq=False)  # layers of other widths have another, be it equal
class LayerLayout:
    """A layer's formats, and how many of its newest tokens stay exact."""

    formats: CacheFormats
    residual: int


def cache_types() -> list[str]:
    """Every name that --cache-type-k and -v take."""
    return [n for n in registry.names("formats") if _is_cache_type(n)]


def check(config: CacheConfig) -> None:
    """Raise ConfigError for what is wrong whatever the model: types, transforms, overrides."""
    for name in (config.type_k, config.type_v):
        _check_sinks(name, sinks_of(config))
    policy_of(config)
    if config.tail_type is not None and config.tail_type not in TAIL_TYPES:
        raise ConfigError(
            f"kv tail type '{config.tail_type}' is unknown; it is one of {', '.join(TAIL_TYPES)}"
        )
    for transform, flag in _flags(config):
        transforms.check(transform, flag)
    if config.position not in ("write", "read"):
        raise ConfigError(f"--kv-position '{config.position}' is unknown: it is write or read")
    _overrides(config)


def _check_sinks(name: str, sinks: int) -> None:
    """Raise ConfigError: the type's ranges were measured without the tokens that it would hold."""
    if _format(name).calibration == "levels" and sinks < LEAST_SINKS:
        raise ConfigError(
            f"cache type {name} needs the first {LEAST_SINKS} tokens kept exact, because its "
            f"ranges are measured without them: --kv-sinks {sinks} is too few"
        )


def layouts_of(config: CacheConfig, shapes: Sequence[LayerShape]) -> list[LayerLayout]:
    """Each layer's formats.  Raises ConfigError: as `check`, or what the model's shape forbids."""
    check(config)
    types = [(config.type_k, config.type_v)] * len(shapes)
    for first, last, type_k, type_v, part in _overrides(config):
        if last >= len(shapes):
            raise ConfigError(
                f"cache type override '{part}': the model has layers 0 to {len(shapes) - 1}"
            )
        for layer in range(first, last + 1):
            old_k, old_v = types[layer]
            types[layer] = (type_k or old_k, type_v or old_v)
    # one object for equal layers: kernels and pages are grouped by it
    made: dict[Any, LayerLayout] = {}
    return [
        made.setdefault((*pair, shape.d_k, shape.d_v, shape.shared), _layout(config, pair, shape))
        for pair, shape in zip(types, shapes, strict=True)
    ]


def layers_with_own_keys(config: CacheConfig) -> set[int]:
    """Layers for which an override names a key type."""
    return {
        layer
        for first, last, type_k, _, _ in _overrides(config)
        if type_k
        for layer in range(first, last + 1)
    }


def _layout(config: CacheConfig, types: tuple[str, str], shape: LayerShape) -> LayerLayout:
    if shape.shared:
        return _shared_layout(config, types, shape)
    tails, maps = [], []
    for name, (transform, flag), d in zip(
        types, _flags(config), (shape.d_k, shape.d_v), strict=True
    ):
        tails.append(config.tail_type or (name if name in ("f32", "bf16") else "f16"))
        maps.append(_transform(name, transform, d, flag))
    residuals: list[int] = [_format(name).residual for name in types]
    return LayerLayout(
        CacheFormats(
            types[0],
            types[1],
            tails[0],
            tails[1],
            maps[0],
            maps[1],
            _position(config, types[0], maps[0]),
        ),  # fmt: skip
        max(residuals) if config.residual is None else config.residual,
    )


def _shared_layout(config: CacheConfig, types: tuple[str, str], shape: LayerShape) -> LayerLayout:
    """Where values are channels of the keys: what holds for keys holds for both."""
    name = types[0]
    if types[1] != name:
        raise ConfigError(
            f"this model's values are a part of its keys, which one tensor holds: cache type "
            f"{types[1]} for values must be {name}, the keys' (--cache-type-k, --cache-type-v, "
            "overrides)"
        )
    if config.position == "read" or _format(name).key_position == "read":
        raise ConfigError(
            f"this model's cache holds keys as RoPE has turned them: --kv-position read and the "
            f"nuq types do not work with it; use another type than {name}, or write"
        )
    flag_k, flag_v = _flags(config)
    map_ = _transform(name, flag_k[0], shape.d_v, flag_k[1])
    if flag_v[0] != "auto" and _transform(name, flag_v[0], shape.d_v, flag_v[1]) != map_:
        raise ConfigError(
            f"this model's values are a part of its keys: --kv-transform-v {flag_v[0]} must be "
            f"{map_}, the keys', or auto"
        )
    tail = config.tail_type or (name if name in ("f32", "bf16") else "f16")
    residual: int = _format(name).residual if config.residual is None else config.residual
    return LayerLayout(CacheFormats(name, name, tail, tail, map_, map_), residual)


def _transform(name: str, transform: str, d: int, flag: str) -> str:
    preferred: str = _format(name).transform
    if preferred == "random" and transform not in ("auto", "random"):
        raise ConfigError(
            f"cache type {name} has a random rotation of its own: leave {flag} at auto, "
            f"not {transform}"
        )
    return transforms.resolve(transform, preferred, d, flag)


def _position(config: CacheConfig, name: str, transform: str) -> str:
    """When RoPE turns the keys of that type."""
    format_ = _format(name)
    if config.position == "write" and format_.key_position == "write":
        return "write"
    if not (format_.key_position == "read" or name in TAIL_TYPES or format_.key_axis == "channel"):
        raise ConfigError(
            f"--kv-position read takes keys whose scales go by channel, or none: f32, f16, bf16, "
            f"kivi and nuq, not {name}"
        )
    if transform != "none":
        raise ConfigError(
            f"--kv-transform-k {transform} cannot be applied to keys that RoPE turns when they are "
            "read: the turn of each token would have to be undone in mixed channels; use none"
        )
    return "read"


def _flags(config: CacheConfig) -> tuple[tuple[str, str], tuple[str, str]]:
    return (config.transform_k, "--kv-transform-k"), (config.transform_v, "--kv-transform-v")


def _overrides(config: CacheConfig) -> list[tuple[int, int, str | None, str | None, str]]:
    """First layer, last layer, key type, value type, and the words themselves."""
    found = []
    for part in filter(None, re.sub(r"\s", "", config.override or "").split(";")):
        match = _OVERRIDE.fullmatch(part)
        if not match or not (match[3] or match[5]) or bool(match[4]) != bool(match[3] and match[5]):
            raise ConfigError(
                f"cache type override '{part}' is not understood: write it as "
                "0-1=k:q8_0,v:q8_0 or 5=v:f16, several with ; between them"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"cache type override '{part}': {first} comes after {last}")
        for name in (match[3], match[5]):
            if name is not None:
                _format(name, f"cache type override '{part}': ")
                _check_sinks(name, sinks_of(config))
        found.append((first, last, match[3], match[5], part))
    return found


def _format(name: str, where: str = "") -> Any:
    if not _is_cache_type(name):
        raise ConfigError(
            f"{where}unknown cache type '{name}': it is one of {', '.join(cache_types())}"
        )
    return find(name)


def _is_cache_type(spec: str) -> bool:
    name = spec.partition(":")[0]
    return name in registry.names("formats") and (
        "cache" in registry.find("formats", name, "cache type").FORMAT.roles
    )


@dataclass(frozen=True)
class Band:
    """Layers whose pages have the same sizes and are encoded at the same tokens."""

    formats: CacheFormats
    residual: int
    layers: list[int]
    sizes: dict[tuple[str, int], int]  # bytes by kind (sinks, page, tail) and side
    policy: bool  # whether a policy acts on these layers
    whole: bool  # whether these are all layers

    @property
    def exact(self) -> bool:
        """Whether nothing is ever encoded."""
        return self.formats.exact

    @property
    def sides(self) -> list[int]:
        """The sides that have pages: 0 keys, 1 values."""
        return sorted({side for _, side in self.sizes})

    def exact_point(self, sinks: int, encoded: int, n: int) -> int:
        """The most tokens up to n that can be gone back to, where so many pages are encoded."""
        if self.exact or encoded == 0 or sinks + encoded * PAGE + self.residual <= n:
            return n
        if self.residual == 0 and n >= sinks:
            return sinks + (n - sinks) // PAGE * PAGE
        return min(n, sinks)

    def estimate(self, shape: LayerShape, n: int) -> int:
        """Bytes that n tokens of one sequence take in one of the layers."""
        kept = min(n, shape.window + PAGE) if shape.window else n
        tail = kept if self.exact else min(kept, self.residual + PAGE)
        tokens = {"sinks": 1, "page": kept - tail, "tail": tail}
        return sum(
            -(-tokens[kind] // PAGE) * n_bytes * shape.n_kv
            for (kind, _), n_bytes in self.sizes.items()
        )


def bands_of(config: CacheConfig, shapes: Sequence[LayerShape]) -> list[Band]:
    """The layers in bands.  Raises ConfigError: as `layouts_of`."""
    layouts, policy = layouts_of(config, shapes), policy_of(config)[0]
    acts = [policy is not None and shape.window == 0 for shape in shapes]
    bands = []
    for layout, acted in dict.fromkeys(zip(layouts, acts, strict=True)):
        layers = [i for i, pair in enumerate(zip(layouts, acts, strict=True))
                  if pair == (layout, acted)]  # fmt: skip
        shape, sizes = shapes[layers[0]], {}
        for kind in ("sinks", "page", "tail"):
            for side in (0, 1):
                n_bytes = _page_bytes(shape, layout.formats, side, kind, sinks_of(config))
                if n_bytes:
                    sizes[kind, side] = n_bytes
        bands.append(Band(
            layout.formats, layout.residual, layers, sizes, acted, len(layers) == len(shapes)
        ))  # fmt: skip
    _check_policy(policy, bands, shapes)
    return bands


def policy_of(config: CacheConfig) -> tuple[Policy | None, Budget | None]:
    """The settings' policy and its budget; None: every token is kept.

    Raises ConfigError: names or numbers that are not understood, a budget that is missing, of no
    use, or too small.
    """
    policy = policies.parse(config.policy)
    if policy is None or not policy.takes_budget:
        if config.budget is not None:
            raise ConfigError(
                f"--kv-budget {config.budget} has no effect with --kv-policy {config.policy}; "
                "leave it out or choose another policy"
            )
        return policy, None
    if config.budget is None:
        raise ConfigError(
            f"--kv-policy {policy.name} needs --kv-budget: a number of tokens such as 1024, or a "
            "share of those seen such as 20%"
        )
    budget = Budget.parse(config.budget)
    policy.check(budget.of(0), sinks_of(config))
    return policy, budget


def sinks_of(config: CacheConfig) -> int:
    """The first tokens that stay exact: none under a policy that drops them."""
    policy = policies.parse(config.policy)
    return config.sinks if policy is None or policy.keeps_sinks else 0


def _check_policy(
    policy: Policy | None, bands: Sequence[Band], shapes: Sequence[LayerShape]
) -> None:
    """Raise ConfigError: the policy cannot act on this model or on these formats."""
    if policy is None:
        return
    mine = [band for band in bands if band.policy]
    if not mine:
        raise ConfigError(
            f"--kv-policy {policy.name} has nothing to act on: every layer of the model has a "
            "sliding window of its own"
        )
    if any(shapes[i].shared for band in mine for i in band.layers):
        raise ConfigError(
            f"--kv-policy {policy.name} does not work with this model, whose cache holds latent "
            "vectors in the place of keys and values; leave it out"
        )
    if len({(shapes[i].n_kv, shapes[i].n_head) for band in mine for i in band.layers}) > 1:
        raise ConfigError(f"--kv-policy {policy.name} needs as many heads in every layer")
    if policy.per_head and any(band.formats.position == "read" for band in mine):
        raise ConfigError(
            f"--kv-policy {policy.name} leaves pages whose tokens do not follow each other, and "
            "keys that RoPE turns when they are read (nuq, --kv-position read) need that they do; "
            "choose another key type, or the policy window or sinks"
        )


def _page_bytes(shape: LayerShape, formats: CacheFormats, side: int, kind: str, sinks: int) -> int:
    """Bytes of a layer's page: side 0 keys, 1 values; kind page, tail or sinks; 0: it has none."""
    slots = (sinks + 15) // 16 * 16 if kind == "sinks" else PAGE
    if slots == 0 or (side == 1 and shape.shared):
        return 0
    if kind == "page" and shape.shared:
        width = latent.key_width(formats.transform_k, shape)
        return int(latent.key_format(formats.page_k, shape).page_bytes(width, "key"))
    name, d = (formats.page_k, formats.page_v)[side], (shape.d_k, shape.d_v)[side]
    if kind == "page":
        d = transforms.width((formats.transform_k, formats.transform_v)[side], d)
    else:
        name = (formats.tail_k, formats.tail_v)[side]
    n_bytes: int = find(name).page_bytes(d, SIDES[side], slots)
    return n_bytes
