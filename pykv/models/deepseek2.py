"""DeepSeek V2 with multi-head latent attention: one latent and one turned key for all heads.

The cache holds a token's normed latent and, behind it, the key channels that turn. Queries go into
the latent's space (`attn_k_b`, each head by a matrix of its own), and what attention gives comes
back from there (`attn_v_b`): the absorbed form, at every length. Layers with experts are refused.
Source: llama.cpp src/models/deepseek2.cpp; DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434,
appendix C; tests/models/test_deepseek2.py pins logits to transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pykv.backends.base import Array, LayerShape, Step
from pykv.errors import GGUFError, UnsupportedError
from pykv.models.base import Graph, read_rope
from pykv.models.blocks import Mlp, Projection, mlp, projection

MOST_CHANNELS = 640  # of a cached key, which kernels have room for


@dataclass(frozen=True)
class Layer:
    """One block's weights; `q_a` and its norm are None where queries have no latent."""

    attn_norm: Any
    q_a: Projection | None
    q_a_norm: Any | None
    q: Projection
    kv_a: Projection
    kv_a_norm: Any
    k_b: Any
    v_b: Any
    attn_output: Projection
    ffn_norm: Any
    mlp: Mlp


class Deepseek2(Graph):
    """`deepseek2.*` keys."""

    def load_layer(self, i: int) -> Layer:
        """The weights of layer i.  Raises GGUFError, UnsupportedError."""
        h, w, b = self.h, self.weights, f"blk.{i}"
        if i == 0:
            self._check_experts()
            self._read_widths()
            self._read_rope()
        heads = h.n_head[i]
        q_a, q_a_norm, n_in, name = None, None, h.n_embd, "attn_q"
        if not w.has(f"{b}.attn_q.weight") and self.q_rank:
            n_in, name = self.q_rank, "attn_q_b"
            q_a = projection(w, f"{b}.attn_q_a", n_in, h.n_embd)
            q_a_norm = w.vector(f"{b}.attn_q_a_norm.weight", n_in)
        if w.has(f"{b}.attn_kv_b.weight"):
            raise UnsupportedError(
                f"{self.file.file}: attn_kv_b holds key and value weights in one matrix, as old "
                "files do; pykv reads attn_k_b and attn_v_b: convert the model anew"
            )
        return Layer(
            w.vector(f"{b}.attn_norm.weight", h.n_embd),
            q_a,
            q_a_norm,
            projection(w, f"{b}.{name}", heads * self.width, n_in),
            projection(w, f"{b}.attn_kv_a_mqa", h.d_k, h.n_embd),
            w.vector(f"{b}.attn_kv_a_norm.weight", h.d_v),
            w.heads(f"{b}.attn_k_b.weight", (heads, h.d_v, self.width - self.rope.n_rot)),
            w.heads(f"{b}.attn_v_b.weight", (heads, self.value_width, h.d_v)),
            projection(w, f"{b}.attn_output", h.n_embd, heads * self.value_width),
            w.vector(f"{b}.ffn_norm.weight", h.n_embd),
            mlp(w, h, i),
        )

    def _check_experts(self) -> None:
        h, file = self.h, self.file
        dense = file.get_int("deepseek2.leading_dense_block_count", 0)
        if file.get_int("deepseek2.expert_count", 0) and dense < h.n_layer:
            raise UnsupportedError(
                f"{file.file}: deepseek2 models with experts are not supported yet"
            )

    def _read_widths(self) -> None:
        """Head widths; those of the cache are Hparams' d_k and d_v."""
        h, file, key = self.h, self.file, "deepseek2.attention"
        self.width: int = file.get_int(f"{key}.key_length_mla", 0)
        self.value_width: int = file.get_int(f"{key}.value_length_mla", 0)
        self.q_rank: int = file.get_int(f"{key}.q_lora_rank", 0)
        if self.width < 1 or self.value_width < 1:
            raise UnsupportedError(
                f"{file.file}: {key}.key_length_mla and value_length_mla are missing, as in old "
                "files, whose cache would be many times as large; convert the model anew"
            )
        rank: int = file.get_int(f"{key}.kv_lora_rank")
        if h.d_v != rank or set(h.n_kv) != {1} or h.d_k > MOST_CHANNELS:
            raise GGUFError(
                f"{file.file}: {key}.value_length {h.d_v}, kv_lora_rank {rank}, head_count_kv "
                f"{h.n_kv[0]} and key_length {h.d_k} describe no latent cache: expected the first "
                f"two alike, one KV head and at most {MOST_CHANNELS} channels"
            )

    def _read_rope(self) -> None:
        h, file = self.h, self.file
        rope = read_rope(file, h, neox=False)
        if rope.n_rot != h.d_k - h.d_v or rope.n_rot >= self.width:
            raise GGUFError(
                f"{file.file}: deepseek2.rope.dimension_count is {rope.n_rot}, expected "
                f"{h.d_k - h.d_v}, what keys have beyond the latent, and fewer than the "
                f"{self.width} of attention.key_length_mla"
            )
        scaling = "deepseek2.rope.scaling"
        # a tenth of the model's mscale_all_dim
        step: float = file.get_float(f"{scaling}.yarn_log_multiplier", 0.0)
        magnitude, sharper = rope.magnitude, 1.0
        if step and file.get_str(f"{scaling}.type", "") == "yarn":
            growth = math.log(max(file.get_float(f"{scaling}.factor", 1.0), 1.0))
            # scores are made larger as a whole, in place of cosines and sines
            magnitude, sharper = magnitude / (1 + 0.1 * growth), 1 + step * growth
        self.rope = replace(rope, magnitude=magnitude, first=h.d_v)
        self.scale = sharper**2 / math.sqrt(self.width)

    @property
    def shapes(self) -> list[LayerShape]:
        """One KV head; values are the latent, with which keys begin."""
        h = self.h
        return [LayerShape(n, 1, h.d_k, h.d_v, shared=True) for n in h.n_head]

    def layer(self, i: int, x: Array, step: Step) -> Array:
        """One block, [T, E] -> [T, E]."""
        w, h, dev = self.layers[i], self.h, self.dev
        a = dev.rms_norm(x, w.attn_norm, h.eps)
        o = dev.attention(
            step, i, self._queries(i, a), self._keys(i, a), None, self.rope, self.scale
        )  # [T, H * rank]
        o = dev.heads_linear(o.reshape(-1, h.n_head[i], h.d_v), w.v_b)  # [T, H, D]
        x = w.attn_output(dev, o.reshape(-1, h.n_head[i] * self.value_width), add=x)
        a = dev.rms_norm(x, w.ffn_norm, h.eps)
        return w.mlp.down(dev, dev.swiglu(w.mlp.gate(dev, a), w.mlp.up(dev, a)), add=x)

    def _queries(self, i: int, a: Array) -> Array:
        """[T, E] -> [T, H, rank + turning channels]."""
        w, dev, plain = self.layers[i], self.dev, self.width - self.rope.n_rot
        if w.q_a is not None:
            a = dev.rms_norm(w.q_a(dev, a), w.q_a_norm, self.h.eps)
        q = w.q(dev, a).reshape(-1, self.h.n_head[i], self.width)
        latent = dev.heads_linear(dev.columns(q, 0, plain), w.k_b)
        return dev.concat(latent, dev.columns(q, plain, self.width))

    def _keys(self, i: int, a: Array) -> Array:
        """[T, E] -> [T, 1, rank + turning channels]."""
        w, h, dev = self.layers[i], self.h, self.dev
        kv = w.kv_a(dev, a)
        latent = dev.rms_norm(dev.columns(kv, 0, h.d_v), w.kv_a_norm, h.eps)
        return dev.concat(latent, dev.columns(kv, h.d_v, h.d_k)).reshape(-1, 1, h.d_k)


GRAPH = Deepseek2
