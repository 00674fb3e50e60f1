"""Llama 1 to 3, Mistral, SmolLM and SmolLM2: pre-norms, NORM rope, SwiGLU.

Source: llama.cpp src/models/llama.cpp; tests/models/test_llama.py pins logits to transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykv.backends.base import Array, LayerShape, Step
from pykv.backends.plan import decode
from pykv.errors import GGUFError, UnsupportedError
from pykv.models.base import Graph, read_rope
from pykv.models.blocks import Mlp, Projection, mlp, projection, qkv


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attn_norm: Any
    q: Projection
    k: Projection
    v: Projection
    attn_output: Projection
    ffn_norm: Any
    mlp: Mlp


class Llama(Graph):
    """`llama.*` keys; mixtures of experts are refused."""

    def load_layer(self, i: int) -> Layer:
        """The weights of layer i.  Raises GGUFError, UnsupportedError."""
        h, w = self.h, self.weights
        if i == 0:
            if self.file.get_int(f"{h.arch}.expert_count", 0):
                raise UnsupportedError(
                    f"{self.file.file}: {h.arch} models with experts are not supported yet"
                )
            factors = None
            if w.has("rope_freqs.weight"):
                factors = decode(w.source("rope_freqs.weight", (h.d_k // 2,)))
            self.rope = read_rope(self.file, h, neox=False, factors=factors)
            if self.rope.n_rot != h.d_k:
                raise GGUFError(
                    f"{self.file.file}: {h.arch}.rope.dimension_count is {self.rope.n_rot}, "
                    f"expected {h.d_k}: in this architecture whole heads turn"
                )
        return Layer(
            w.vector(f"blk.{i}.attn_norm.weight", h.n_embd),
            *qkv(w, h, i),
            projection(w, f"blk.{i}.attn_output", h.n_embd, h.n_head[i] * h.d_v),
            w.vector(f"blk.{i}.ffn_norm.weight", h.n_embd),
            mlp(w, h, i),
        )

    @property
    def shapes(self) -> list[LayerShape]:
        """Every layer sees all tokens."""
        h = self.h
        return [LayerShape(n, g, h.d_k, h.d_v) for n, g in zip(h.n_head, h.n_kv, strict=True)]

    def layer(self, i: int, x: Array, step: Step) -> Array:
        """One block, [T, E] -> [T, E]."""
        w, h, dev = self.layers[i], self.h, self.dev
        a = dev.rms_norm(x, w.attn_norm, h.eps)
        q = w.q(dev, a).reshape(-1, h.n_head[i], h.d_k)  # [T, H, D]
        k = w.k(dev, a).reshape(-1, h.n_kv[i], h.d_k)  # [T, G, D]
        v = w.v(dev, a).reshape(-1, h.n_kv[i], h.d_v)  # [T, G, D]
        o = dev.attention(step, i, q, k, v, self.rope, h.d_k**-0.5)  # [T, H * D]
        x = w.attn_output(dev, o, add=x)
        a = dev.rms_norm(x, w.ffn_norm, h.eps)
        return w.mlp.down(dev, dev.swiglu(w.mlp.gate(dev, a), w.mlp.up(dev, a)), add=x)


GRAPH = Llama
