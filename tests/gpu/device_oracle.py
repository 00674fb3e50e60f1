"""The store's oracle for pages that lie on a GPU, and how far its outputs may be off there."""

from __future__ import annotations

import numpy as np
import torch
from verbs import BackendOracle

POOL_BYTES = 48 << 20  # more than these tests need: pages lie in one slab
# float16 and bfloat16 round to 11 and 8 bits
ROUNDING = {"f16": 2.0**-11, "bf16": 2.0**-8 / 2, "f32": 2.0**-24}
# A matrix unit adds products up with 22 bits and more; see Fasi et al., PeerJ CS 7:e330, 2021.
SUMMING = 2.0**-22
LEAST = 2.0**-25  # half of float16's smallest number


class DeviceOracle(BackendOracle):
    """Pages are read from a copy of the GPU's memory."""

    def __init__(self, config, shapes, n_ctx, seed, backend, calibrated):
        super().__init__(config, shapes, n_ctx, seed, backend, calibrated)
        memory = self.store.memory
        memory.reserve(POOL_BYTES)
        memory.pool.fill_(255)  # what was never written is NaN
        self._copy = torch.empty_like(memory.pool, device="cpu")

    def real(self, address):
        assert 0 <= address * self.store.memory.unit < POOL_BYTES
        return self._copy.data_ptr() + address * self.store.memory.unit

    def _fetch(self):
        self._copy.copy_(self.store.memory.pool)

    def learn(self, sequence, n):
        self._fetch()
        super().learn(sequence, n)

    def check(self):
        self._fetch()
        super().check()

    def _poison(self):
        super()._poison()
        self.store.memory.pool.copy_(self._copy)

    def bound(self, layer, query, k, v, expected):
        """With queries, keys, weights and values rounded by u each, before they are multiplied.

        A score is then off by e = (2 u + d s) |q| |k| scale at most, where s is what sums lose and
        transforms keep lengths; for keys that are turned where they are read, by sqrt(2) times
        that, since queries and keys are both taken apart. A softmax weight p changes by a factor
        of exp(-e) to exp(e) before weights are brought to the sum 1, which takes it to exp(2 e) at
        most. As the sum of p (v - o) over tokens is zero for the exact output o, the output moves
        by exp(e) * sum p (exp(e) - 1) |v - o|. Rounding p and v adds (2 u + n s) |v| for each
        token's share, and what float16 has no small enough number for, n * 2**-25 of the largest v.
        """
        formats = self.store.formats[layer]
        types = {formats.page_k, formats.page_v, formats.tail_k, formats.tail_v}
        u = next((ROUNDING[t] for t in ("f32", "bf16") if t in types), ROUNDING["f16"])
        scale, (n, d) = self.scale(layer), k.shape
        apart = 2**0.5 if self.rope is not None else 1.0
        sizes = scale * np.linalg.norm(query, axis=1)[:, None] * np.linalg.norm(k, axis=1)
        # a tenth of u: products of roundings, and numbers too small for float16
        e = apart * (2.1 * u + d * SUMMING) * sizes
        scores = scale * query @ k.T
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        away = np.linalg.norm(v[None] - expected[:, None], axis=2)
        lengths, most = np.linalg.norm(v, axis=1), e.max(1)
        moved = np.exp(most) * (p * np.expm1(e) * away).sum(1)
        rounded = np.exp(2 * most) * (2.1 * u + n * SUMMING) * (p @ lengths)
        return moved + rounded + n * LEAST * lengths.max()
