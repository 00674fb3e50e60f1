"""Gemma 3 (text): norms around both branches, q and k norms, GeGLU, five local layers to a global.

The norms' weights already include Gemma's +1. Local layers see a window and turn by a base and
scale of their own; files that lack the keys for them rely on the defaults below.
Source: llama.cpp src/models/gemma3.cpp; tests/models/test_gemma3.py pins logits to transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykv.backends.base import Array, LayerShape, Step
from pykv.errors import GGUFError
from pykv.models.base import Graph, read_rope, rope_base
from pykv.models.blocks import Mlp, Projection, mlp, projection, qkv

PATTERN = 6  # every sixth layer is global
LOCAL_BASE = 10000.0
LAYERS_27B = 62  # its query scale is that of the embedding, not of the head


@dataclass(frozen=True)
class Layer:
    """One block's weights."""

    attn_norm: Any
    q: Projection
    k: Projection
    v: Projection
    q_norm: Any
    k_norm: Any
    attn_output: Projection
    post_attention_norm: Any
    ffn_norm: Any
    mlp: Mlp
    post_ffw_norm: Any


class Gemma3(Graph):
    """`gemma3.*` keys."""

    def load_layer(self, i: int) -> Layer:
        """The weights of layer i.  Raises GGUFError."""
        h, w, b = self.h, self.weights, f"blk.{i}"
        if i == 0:
            self._read_constants()
        return Layer(
            w.vector(f"{b}.attn_norm.weight", h.n_embd),
            *qkv(w, h, i),
            w.vector(f"{b}.attn_q_norm.weight", h.d_k),
            w.vector(f"{b}.attn_k_norm.weight", h.d_k),
            projection(w, f"{b}.attn_output", h.n_embd, h.n_head[i] * h.d_v),
            w.vector(f"{b}.post_attention_norm.weight", h.n_embd),
            w.vector(f"{b}.ffn_norm.weight", h.n_embd),
            mlp(w, h, i),
            w.vector(f"{b}.post_ffw_norm.weight", h.n_embd),
        )

    def _read_constants(self) -> None:
        h, file = self.h, self.file
        self.window: int = file.get_int("gemma3.attention.sliding_window", 0)
        self.local = self._local_layers()
        base = rope_base(file, "gemma3", "freq_base_swa", LOCAL_BASE)
        self.global_rope = read_rope(file, h, neox=True)
        self.local_rope = read_rope(file, h, neox=True, base=base, scaled=False)
        big = h.n_layer == LAYERS_27B
        self.scale = (h.n_embd / h.n_head[0]) ** -0.5 if big else h.d_k**-0.5
        self.softcap: float = file.get_float("gemma3.final_logit_softcapping", 0.0)

    def _local_layers(self) -> list[bool]:
        """Which layers see only the window."""
        n, key = self.h.n_layer, "gemma3.attention.sliding_window_pattern"
        if self.window <= 0:
            return [False] * n
        # a list holds the flags themselves; one number is the period, 0: no layer is global
        if not isinstance(self.file.metadata.get(key, PATTERN), int):
            return [bool(flag) for flag in self.file.get_ints(key, n)]
        period: int = self.file.get_int(key, PATTERN)
        if period < 0:
            raise GGUFError(f"{self.file.file}: {key} is {period}, not 0 or more")
        return [period == 0 or i % period < period - 1 for i in range(n)]

    @property
    def shapes(self) -> list[LayerShape]:
        """Local layers see the window, global ones all tokens."""
        h = self.h
        return [
            LayerShape(h.n_head[i], h.n_kv[i], h.d_k, h.d_v, self.window if self.local[i] else 0)
            for i in range(h.n_layer)
        ]

    def embed(self, step: Step) -> Array:
        """The tokens' embeddings times sqrt(E)."""
        return self.dev.scale(self.dev.embed(self.embedding, step), self.h.n_embd**0.5)

    def layer(self, i: int, x: Array, step: Step) -> Array:
        """One block, [T, E] -> [T, E]."""
        w, h, dev = self.layers[i], self.h, self.dev
        a = dev.rms_norm(x, w.attn_norm, h.eps)
        q = dev.rms_norm(w.q(dev, a).reshape(-1, h.n_head[i], h.d_k), w.q_norm, h.eps)
        k = dev.rms_norm(w.k(dev, a).reshape(-1, h.n_kv[i], h.d_k), w.k_norm, h.eps)
        v = w.v(dev, a).reshape(-1, h.n_kv[i], h.d_v)
        rope = self.local_rope if self.local[i] else self.global_rope
        o = w.attn_output(dev, dev.attention(step, i, q, k, v, rope, self.scale))
        x = dev.add(x, dev.rms_norm(o, w.post_attention_norm, h.eps))
        a = dev.rms_norm(x, w.ffn_norm, h.eps)
        f = w.mlp.down(dev, dev.geglu(w.mlp.gate(dev, a), w.mlp.up(dev, a)))
        return dev.add(x, dev.rms_norm(f, w.post_ffw_norm, h.eps))

    def forward(self, step: Step) -> Array:
        """Logits of the rows that are wanted; softcapped where the file says so."""
        logits = super().forward(step)
        return self.dev.softcap(logits, self.softcap) if self.softcap > 0 else logits


GRAPH = Gemma3
