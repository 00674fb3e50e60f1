"""Attention of what a policy has kept, and its column sums, in Triton's interpreter.

Each KV head has a place, encoded pages and slots in use of its own. The bound on outputs is that of
test_attention_triton.py; a weight, at most 1, is off by the share of it that moves there.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from test_attention_triton import Cache, extras, launch, queries, settings, turns  # noqa: E402

attention = import_module("pykv.kernels.attention_triton")
statistics = import_module("pykv.kernels.statistics_triton")
tl = triton.language

GROUP, TILE, LENGTH, SINKS = 3, 16, 200, 4
PLACES = (199, 120)  # of both heads


class Kept:
    """Two heads of one row: the same tokens, encoded differently, and what of them is in use."""

    def __init__(self, types, d):
        rng = np.random.default_rng(5)
        self.heads = [Cache(types, d, 2, [LENGTH], SINKS, residual) for residual in (64, 128)]
        first, second = self.heads
        self.tables = np.stack([first.tables[0][:, 0], second.tables[0][:, 1] + first.places], 1)
        self.pool = torch.from_numpy(np.concatenate([first.pool, second.pool]))
        capacity = self.tables.shape[2]
        self.used = rng.random((2, capacity, 64)) < 0.5
        self.used[:, 0] = np.arange(64) < SINKS
        self.used[1, 1] = False  # a whole page may be empty
        for h, place in enumerate(PLACES):
            self.used[h, 1 + (place - SINKS) // 64, (place - SINKS) % 64] = True
        self.alive = np.packbits(self.used, -1, bitorder="little").view(np.int64)[..., 0].copy()
        self.words = np.array([[place, int(c.records[0, 4])]
                               for place, c in zip(PLACES, self.heads, strict=True)])  # fmt: skip
        self.sums = torch.full((2, capacity, 64), torch.nan)
        at = self.tables.ctypes.data
        self.records = np.zeros((1, 16), np.int64)
        self.records[0, :11] = (
            at, at + self.tables[0].nbytes, capacity, SINKS, self.words[:, 1].max(), max(PLACES), 0,
            777, self.words.ctypes.data, self.alive.ctypes.data, self.sums.data_ptr(),
        )  # fmt: skip

    def launch(self, q, q_sinks):
        """Outputs [H, d], and every query head's shares [H, capacity, 64]."""
        cache, capacity, chunks = self.heads[0], self.tables.shape[2], 2
        heads, d = 2 * GROUP, cache.d
        width, scale = launch.sums(d), float(np.log2(np.e) / np.sqrt(d))
        partial = torch.full((1, heads, chunks, width), torch.nan)
        stats, out = torch.full((1, heads, chunks, 2), torch.nan), torch.full(q.shape, torch.nan)
        rows, records = torch.zeros(1, dtype=torch.int32), torch.from_numpy(self.records)
        extra_k, extra_v = extras(cache, GROUP)
        query, sinks = torch.from_numpy(q), torch.from_numpy(q_sinks)
        fixed, angles = settings(cache, tl.float16), turns(None, 0, 0)
        tile = {"GROUP": GROUP, "TILE": TILE, "SINKS": True}
        attention.attend_rows[(1, 2, 2)](
            self.pool, records, rows, query, query, sinks, partial, stats, extra_k, extra_v,
            extra_k.shape[1], extra_v.shape[1], 2, chunks, 2, scale, *angles, KEPT=True, **tile,
            **fixed,
        )  # fmt: skip
        attention.combine[(1, heads)](
            records, rows, partial, stats, out, out, chunks, width, **launch.combination(heads, d)
        )
        each = torch.zeros(1, heads, capacity, 64)
        for of_heads in (False, True):
            statistics.column_sums[(1, 2, 2)](
                self.pool, records, rows, query, query, sinks, stats, each, extra_k,
                extra_k.shape[1], 2, chunks, 2, capacity, scale, *angles, EACH=of_heads, **tile,
                **statistics.parameters(fixed),
            )  # fmt: skip
        return out.numpy()[0], each.numpy()[0]

    def expected(self, q, q_sinks):
        """The same in float64 from the decoded values."""
        out, each = np.zeros(q.shape[1:]), np.zeros((q.shape[1], self.tables.shape[2], 64))
        slot = np.arange(LENGTH)
        entry, slot = np.where(slot < SINKS, 0, 1 + (slot - SINKS) // 64), (slot - SINKS) % 64
        slot[:SINKS] = np.arange(SINKS)
        for head in range(q.shape[1]):
            h = head // GROUP
            k, v = self.heads[h].decoded[0][0][:, h].astype(np.float64)
            s = k @ q[0, head]
            s[:SINKS] = k[:SINKS] @ q_sinks[0, head]
            seen = self.used[h, entry, slot] & (np.arange(LENGTH) <= PLACES[h])
            p = np.where(seen, np.exp((s - s[seen].max()) / np.sqrt(q.shape[2])), 0)
            p /= p.sum()
            out[head], each[head, entry, slot] = p @ v, p
        return out, each


@pytest.mark.parametrize(("types", "d"), [(("f16", "f16"), 32), (("q4_0", "q8_0"), 64),
                                          (("kivi2", "kivi2"), 40)])  # fmt: skip
def test_each_head_sees_its_own_tokens_and_says_how_much(types, d):
    kept = Kept(types, d)
    q, q_sinks = queries(kept.heads[0], GROUP), queries(kept.heads[0], GROUP)[:, ::-1].copy()
    out, each = kept.launch(q, q_sinks)
    exact, shares = kept.expected(q, q_sinks)
    largest = max(np.abs(cache.decoded[0][0][1]).max() for cache in kept.heads)
    # scores below 8
    assert np.abs(out - exact).max() <= 2.0**-11 * largest * 18
    assert np.abs(each - shares).max() <= 2.0**-11 * 18
    np.testing.assert_allclose(each.sum((1, 2)), 1, rtol=0, atol=1e-5)
    by_head = each.reshape(2, GROUP, *each.shape[1:]).sum(1)
    for h, place in enumerate(PLACES):
        entries = 2 + (place - SINKS) // 64
        np.testing.assert_allclose(
            kept.sums[h, :entries].numpy(), by_head[h, :entries], rtol=0, atol=1e-6
        )
        assert np.isnan(kept.sums[h, entries:].numpy()).all()
