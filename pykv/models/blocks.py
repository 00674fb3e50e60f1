"""Parts that several architectures share: functions, never base classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykv.backends.base import Array, Backend
from pykv.models.base import Hparams, Weights


@dataclass(frozen=True)
class Projection:
    """A matrix with an optional bias."""

    weight: Any
    bias: Any | None = None

    def __call__(self, dev: Backend, x: Array, add: Array | None = None) -> Array:
        """[T, n_in] -> [T, n_out], plus the bias and `add`."""
        y = dev.linear(x, self.weight, add)
        return y if self.bias is None else dev.bias(y, self.bias)


def projection(w: Weights, name: str, n_out: int, n_in: int) -> Projection:
    """`<name>.weight` and, where the file has it, `<name>.bias`."""
    return Projection(
        w.matrix(f"{name}.weight", n_out, n_in), w.optional_vector(f"{name}.bias", n_out)
    )


def qkv(w: Weights, h: Hparams, i: int) -> tuple[Projection, Projection, Projection]:
    """The projections to queries, keys and values; a fused matrix is split where it lies."""
    sizes = (h.n_head[i] * h.d_k, h.n_kv[i] * h.d_k, h.n_kv[i] * h.d_v)
    names = [f"blk.{i}.attn_{part}" for part in "qkv"]
    fused = f"blk.{i}.attn_qkv.weight"
    if not w.has(fused):
        q, k, v = (projection(w, n, s, h.n_embd) for n, s in zip(names, sizes, strict=True))
        return q, k, v
    ends = (sizes[0], sizes[0] + sizes[1], sum(sizes))
    q, k, v = (
        Projection(
            w.rows(fused, end - size, end, h.n_embd, ends[2]),
            _fused_bias(w, i, name, (end - size, end, ends[2])),
        )
        for name, size, end in zip(names, sizes, ends, strict=True)
    )
    return q, k, v


def _fused_bias(w: Weights, i: int, name: str, place: tuple[int, int, int]) -> Any | None:
    """The bias beside a fused matrix: a part (start, stop, of all) of a fused one, or its own."""
    start, stop, _ = place
    if w.has(f"blk.{i}.attn_qkv.bias"):
        return w.part(f"blk.{i}.attn_qkv.bias", *place)
    return w.optional_vector(f"{name}.bias", stop - start)


@dataclass(frozen=True)
class Mlp:
    """A gated feed-forward layer's weights."""

    gate: Projection
    up: Projection
    down: Projection


def mlp(w: Weights, h: Hparams, i: int) -> Mlp:
    """The feed-forward weights of layer i."""
    return Mlp(
        projection(w, f"blk.{i}.ffn_gate", h.n_ff[i], h.n_embd),
        projection(w, f"blk.{i}.ffn_up", h.n_ff[i], h.n_embd),
        projection(w, f"blk.{i}.ffn_down", h.n_embd, h.n_ff[i]),
    )
