"""Guard rails: keys that a cache type would spoil, kernels that err, logits that are no numbers.

Some models add a large bias to their keys (Qwen2, Qwen2.5), or have a few key channels far larger
than the rest. Types whose scale spans the channels of one token then spend their codes on those,
and what tells tokens apart is lost. Types with a scale per channel or per head do not mind.

A layer is judged by its weights alone. What enters its attention is a normed vector times the
norm's weight; for a random one a projected channel is normally distributed, its variance the sum
of the squared row of the weight, around the bias. Such keys are encoded once, and the error of a
score follows from the predicted sizes of the queries' channels. On the layers of SmolLM2-135M and
Gemma 3 270M this is mostly within a factor of 2.5 of what text gives, and up to 6.5 in a
first layer: for q4_0 0.03 to 0.9 where text gives 0.2 to 1.2.
Source: ggml-org/llama.cpp PR 21038 names the models that 4-bit keys break; the estimate is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from pykv.backends import selftest
from pykv.backends.base import F32, PAGE, Backend, LayerShape, Step
from pykv.backends.plan import decode
from pykv.backends.transforms import LOWRANK, matrix
from pykv.cache import layout
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.errors import NumericsError
from pykv.formats.coded import find
from pykv.gguf import GGUFFile

log = logging.getLogger("pykv")

SAFE = ("q8_0", "f16")  # what a flagged layer's keys are kept in: the first that does
# A layer is flagged where the error of its scores is above this, in nats,
MOST_ERROR = 0.5
# and so many times what it would be without the bias, or with channels of equal size: else the type
# is to blame, and not the keys. Without bias the two models reach 5.6 times, by their channels.
MOST_BY_BIAS, MOST_BY_CHANNELS = 2.0, 6.5
COLUMNS = 256  # of a weight's row that are looked at, about
SEED = 11


@dataclass(frozen=True)
class _Heads:
    """Predicted sizes of a layer's channels before RoPE: keys f32 [G, D], queries [G, n, D]."""

    std: F32
    bias: F32
    queries: F32  # root mean square, the bias included; n query heads of each group


def guarded(config: CacheConfig, file: GGUFFile, shapes: Sequence[LayerShape]) -> CacheConfig:
    """The settings with a safe key type in the layers that need one; the log says which and why.

    A key type that an override names for a layer stays. With `config.guard` off all stay, and the
    log says which layers may suffer. A layer whose weights have unknown names is not judged.
    """
    name = config.type_k
    if not _spans_channels(name):
        return config
    own = layout.layers_with_own_keys(config)
    errors: dict[int, float] = {}
    safe: dict[int, str] = {}
    for i, planned in enumerate(layout.layouts_of(config, shapes)):
        heads = None if i in own else _heads(file, i, shapes[i])
        if heads is None:
            continue
        error = _flagged(heads, name, planned.formats.transform_k)
        if error:
            errors[i] = error
            safe[i] = next(s for s in SAFE if not _flagged(heads, s, "none"))
    if not safe:
        return config
    kept = " or ".join(sorted(set(safe.values())))
    found = (
        f"layer{'s' if len(safe) > 1 else ''} {_ranges(sorted(safe))}: the keys carry a large bias "
        f"or outlier channels, so that {name} keys would spoil scores by about "
        f"{max(errors.values()):.1f} nats"
    )
    if config.guard == "off":
        log.warning("%s; --kv-guard on would keep %s keys there", found, kept)
        return config
    log.warning("%s; %s keys are kept there (--kv-guard off: all stay %s)", found, kept, name)
    parts = [f"{i}=k:{type_k}" for i, type_k in safe.items()]
    # the last of several overrides counts, so the user's own follow
    return replace(
        config, override=";".join(parts + ([config.override] if config.override else []))
    )


def _ranges(layers: list[int]) -> str:
    """Numbers in order, runs of them as first-last."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _spans_channels(name: str) -> bool:
    """Whether one scale serves several channels of a token."""
    format_: Any = find(name)
    return name not in layout.TAIL_TYPES and format_.key_axis in ("block", "token")


# what the weights say


def _heads(file: GGUFFile, i: int, shape: LayerShape) -> _Heads | None:
    """The predicted sizes in layer i; None: its weights have names or shapes of another kind."""
    group = shape.n_head // shape.n_kv
    k = _channels(file, i, "k", shape.n_head * shape.d_k, list(range(shape.n_kv)), shape.d_k)
    # two query heads of a group tell enough
    chosen = [g * group + h for g in range(shape.n_kv) for h in sorted({0, group - 1})]
    q = _channels(file, i, "q", 0, chosen, shape.d_k)
    if k is None or q is None:
        return None
    queries = np.sqrt(q[0] ** 2 + q[1] ** 2).reshape(shape.n_kv, -1, shape.d_k)
    return _Heads(*k, queries)


def _channels(
    file: GGUFFile, i: int, part: str, first: int, heads: list[int], d: int
) -> tuple[F32, F32] | None:
    """Standard deviation and mean f32 [heads, D] of some heads' channels, their norm included.

    `first`: the row of a fused matrix at which the part begins.
    """
    name = f"blk.{i}.attn_{part}"
    if f"{name}.weight" not in file.tensors:
        name = f"blk.{i}.attn_qkv"
    else:
        first = 0
    weight = file.tensors.get(f"{name}.weight")
    rows = (first + np.array(heads)[:, None] * d + np.arange(d)).reshape(-1)
    if weight is None or len(weight.shape) != 2 or weight.shape[0] <= rows[-1]:
        return None
    std = _row_sizes(weight, rows, file.tensors.get(f"blk.{i}.attn_norm.weight")).reshape(-1, d)
    bias = np.zeros_like(std)
    if f"{name}.bias" in file.tensors:
        bias = decode(file.tensors[f"{name}.bias"])[rows].reshape(-1, d)
    norm = file.tensors.get(f"blk.{i}.attn_{part}_norm.weight")
    if norm is not None:
        if norm.shape != (d,):
            return None
        size = np.sqrt((std**2 + bias**2).mean(-1, keepdims=True))
        gain = decode(norm) / np.maximum(size, np.finfo(np.float32).tiny)
        std, bias = std * gain, bias * gain
    # a damaged file is found out when it runs
    return (std, bias) if np.isfinite(std).all() and np.isfinite(bias).all() else None


def _row_sizes(weight: Any, rows: Any, norm: Any) -> F32:
    """Norms f32 of rows of the weight times the input norm's, from some of their columns."""
    blocks = weight.shape[1] // weight.block_len
    step = max(1, min(blocks // 2, weight.shape[1] // COLUMNS))
    picks = np.arange(0, blocks, step)
    columns = (picks[:, None] * weight.block_len + np.arange(weight.block_len)).reshape(-1)
    data = weight.data.reshape(weight.shape[0], blocks, -1)[rows][:, picks]
    part = replace(
        weight,
        shape=(len(rows), len(columns)),
        data=data.reshape(len(rows), -1),
        nbytes=data.nbytes,
    )
    values = decode(part)
    if norm is not None and norm.shape == weight.shape[1:]:
        values = values * decode(norm)[columns]
    with np.errstate(over="ignore", invalid="ignore"):
        sizes: F32 = np.sqrt((values**2).sum(-1) * np.float32(weight.shape[1] / len(columns)))
    return sizes


# what a type makes of it


@cache
def _normal(d: int) -> F32:
    return np.random.default_rng(SEED).standard_normal((PAGE, d)).astype(np.float32)


@cache
def _plain_error(name: str, transform: str, d: int) -> float:
    """A type's relative error for channels of equal size."""
    x = _normal(d)
    return float(np.sqrt((_errors(x, name, transform) ** 2).mean() / (x**2).mean()))


def _errors(x: F32, name: str, transform: str) -> F32:
    """f32 [64, D]: what a page of that type adds to keys."""
    # a low-rank map's loss is the user's choice, and its bases are no matter of a bias
    format_ = find(name)
    turned = None if transform.startswith(LOWRANK) else matrix(transform, x.shape[1])
    cells = x if turned is None else x @ turned
    if name not in layout.TAIL_TYPES:
        cells = format_.decode_keys(format_.encode_keys(cells), x.shape[1], PAGE)
    back = cells if turned is None else cells @ turned.T
    return np.asarray(back - x, np.float32)


def _flagged(heads: _Heads, name: str, transform: str) -> float:
    """The scores' error in nats of the worst head; 0: it is small, or not the keys' fault."""
    worst, d = 0.0, heads.std.shape[1]
    for std, bias, queries in zip(heads.std, heads.bias, heads.queries, strict=True):
        z = _normal(d) * std
        error = _score_error(_errors(z + bias, name, transform), queries)
        if error.max() <= MOST_ERROR:
            continue
        plain = np.sqrt((queries**2 * std**2).sum(-1) / d) * _plain_error(name, transform, d)
        by_bias = bias.any() and (
            error > MOST_BY_BIAS * _score_error(_errors(z, name, transform), queries)
        )
        blame = (error > MOST_ERROR) & (by_bias | (error > MOST_BY_CHANNELS * plain))
        worst = max(worst, float(error[blame].max(initial=0)))
    return worst


def _score_error(errors: F32, queries: F32) -> F32:
    """The scores' standard errors [n], by errors of keys [64, D] and sizes of queries [n, D]."""
    d = errors.shape[1]
    squares: F32 = queries**2 @ (errors**2).mean(0) / d
    return np.sqrt(squares)


# kernels and logits


def self_test(dev: Backend, store: Store) -> None:
    """Run a backend's kernels once for each kind of layer of a cache whose pages are encoded.

    Raises NumericsError: their output is not the reference's.
    """
    if dev.name == "reference":
        return
    done = set()
    for i, (whole, formats) in enumerate(zip(store.shapes, store.formats, strict=True)):
        shape = selftest.one_head(whole)
        if formats.exact or (shape, formats) in done:
            continue
        done.add((shape, formats))
        alike = replace(
            store.config, type_k=formats.page_k, type_v=formats.page_v, residual=0, override=None,
            policy="full", budget=None,
        )  # fmt: skip
        numbers = [[heads[:1] for heads in store.numbers[i]]] if store.numbers else ()
        memory = dev.page_memory()
        cache = Store([shape], alike, 256, memory, numbers)
        beside = None if memory is None else Store([shape], alike, 256, numbers=numbers)
        selftest.check(dev, cache, shape, formats, beside)


def check_logits(logits: F32, step: Step) -> None:
    """Raise NumericsError for logits [outputs, V] with a NaN or an infinity among them."""
    # a maximum or minimum is NaN where any value is
    if logits.size == 0 or (np.isfinite(logits.max()) and np.isfinite(logits.min())):
        return
    raise bad_logits(step, int(np.argmin(np.isfinite(logits).all(axis=-1))))


def bad_logits(step: Step, output: int) -> NumericsError:
    """What to raise for the logits of one of a step's outputs."""
    return NumericsError(
        f"position {step.positions[step.outputs[output]]}: a logit is not a finite number; the "
        "model file may be damaged, or --kv-tail-type bf16 or another cache type is needed"
    )
