"""RoPE and the tail's writes in Triton's interpreter: bytes are those of the NumPy formats."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from pykv.backends.base import Rope  # noqa: E402
from pykv.formats.coded import find  # noqa: E402

kernels = import_module("pykv.kernels.write_triton")
SINKS, HEADS = 20, 2


class Tails:
    """Pages of HEADS heads for positions 0 to 147, in one pool: sinks, then two tail pages."""

    def __init__(self, types, d, positions):
        self.types, self.d, self.positions = types, d, positions
        self.sizes = [
            [find(t).page_bytes(w, side, slots) for slots in (32, 64, 64)]
            for t, w, side in zip(types, d, ("key", "value"), strict=True)
        ]
        ends = np.cumsum(np.repeat([size for side in self.sizes for size in side], HEADS))
        starts = np.concatenate([[0], ends[:-1]]).reshape(2, 3, HEADS).transpose(0, 2, 1)
        self.starts = starts
        self.table = np.zeros((2, HEADS, 4), np.int64)
        self.table[:, :, :3] = starts // 64
        self.pool = np.full(ends[-1] + 64, 0xA5, np.uint8)
        self.records = np.zeros((len(positions), 16), np.int64)
        at = self.table.ctypes.data
        self.records[:, :5] = (at, at + self.table[0].nbytes, 4, SINKS, 0)
        self.records[:, 5] = positions
        self.flags = torch.zeros(4, dtype=torch.int64)

    def arguments(self):
        return torch.from_numpy(self.pool), torch.from_numpy(self.records)

    def expected(self, rows, k, v):
        """The pool after those rows, by the formats: a page read, changed and written again."""
        pool = np.full_like(self.pool, 0xA5)
        written = np.zeros(pool.shape, bool)
        for side, x in ((0, k), (1, v)):
            format_, d = find(self.types[side]), self.d[side]
            encode = (format_.encode_keys, format_.encode_values)[side]
            for head in range(HEADS):
                for entry in range(3):
                    cells = np.zeros((64 if entry else 32, d), np.float32)
                    marks = np.zeros_like(cells)
                    for row in rows:
                        p = self.positions[row]
                        if (0 if p < SINKS else 1 + (p - SINKS) // 64) == entry:
                            slot = p - (SINKS + (entry - 1) * 64 if entry else 0)
                            cells[slot], marks[slot] = x[row, head], 1
                    at = self.starts[side, head, entry]
                    place = slice(at, at + self.sizes[side][entry])
                    pool[place] = np.where(self._cells(side, marks), encode(cells), 0xA5)
                    written[place] = True
        return pool

    def _cells(self, side, marks):
        """Which bytes of a page belong to the marked tokens, filling of values included."""
        format_, (slots, d) = find(self.types[side]), marks.shape
        item = format_.block_bytes
        if side == 0:
            cells = marks.T
        else:
            filled = np.repeat(marks[:, :1], (d + 31) // 32 * 32, 1)
            cells = filled.reshape(slots, -1, 32).transpose(1, 0, 2)
        bytes_ = np.repeat(cells.reshape(-1) > 0, item)
        size = format_.page_bytes(d, ("key", "value")[side], slots)
        return np.pad(bytes_, (0, size - len(bytes_)))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def turned(x, positions, rope):
    """In float32, product by product, as the reference backend does."""
    cos, sin = (t[:, None, :] for t in rope.tables(positions))
    half, n, y = rope.n_rot // 2, rope.n_rot, x.copy()
    first, second = (
        (slice(0, half), slice(half, n)) if rope.neox else (slice(0, n, 2), slice(1, n, 2))
    )
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def angles(positions, n_rot, neox):
    rope = Rope(neox, 10_000.0 ** -(np.arange(0, n_rot, 2) / n_rot))
    return rope, [torch.from_numpy(t) for t in rope.tables(positions)]


@pytest.mark.parametrize(
    ("types", "d"),
    [(("f16", "f16"), (64, 40)), (("bf16", "f32"), (48, 96)), (("f32", "bf16"), (40, 64))],
)
def test_written_bytes_are_the_formats(types, d):
    positions = np.array([0, 19, 20, 83, 84, 147, 7])
    tails, rows = Tails(types, d, positions), np.array([6, 1, 2, 3, 5], np.int32)
    k, v = (normal(7, HEADS, n, seed=n) * 100 for n in d)
    kernels.write(
        *tails.arguments(), torch.from_numpy(rows), torch.from_numpy(k), torch.from_numpy(v),
        tails.flags, types,
    )  # fmt: skip
    np.testing.assert_array_equal(tails.pool, tails.expected(rows, k, v))
    assert tails.flags.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("d", "n_rot", "neox", "turn_keys"),
    [(64, 48, True, True), (48, 48, True, False), (40, 24, False, True)],
)
def test_one_launch_turns_and_writes(d, n_rot, neox, turn_keys):
    """Turned by the same products, whose sum is rounded once."""
    positions = np.array([3, 100, 84])
    rope, (cos, sin) = angles(positions, n_rot, neox)
    tails, rows = Tails(("f16", "f16"), (d, d), positions), np.arange(3, dtype=np.int32)
    q, k, v = normal(3, 6, d), normal(3, HEADS, d, seed=1), normal(3, HEADS, d, seed=2)
    query = torch.from_numpy(q.copy())
    kernels.rope_write(
        *tails.arguments(), torch.from_numpy(rows), query, torch.from_numpy(k),
        torch.from_numpy(v), cos, sin, tails.flags, ("f16", "f16"), n_rot, neox, turn_keys,
    )  # fmt: skip
    np.testing.assert_array_equal(query.numpy(), turned(q, positions, rope))
    keys = turned(k, positions, rope) if turn_keys else k
    np.testing.assert_array_equal(tails.pool, tails.expected(rows, keys, v))


def test_without_rope_queries_stay():
    tails = Tails(("f16", "f16"), (32, 32), np.array([50]))
    q, k, v = normal(1, 4, 32), normal(1, HEADS, 32, seed=1), normal(1, HEADS, 32, seed=2)
    query, rows = torch.from_numpy(q.copy()), np.zeros(1, np.int32)
    kernels.rope_write(
        *tails.arguments(), torch.from_numpy(rows), query, torch.from_numpy(k),
        torch.from_numpy(v), None, None, tails.flags, ("f16", "f16"), 0, False, True,
    )  # fmt: skip
    np.testing.assert_array_equal(query.numpy(), q)
    np.testing.assert_array_equal(tails.pool, tails.expected(rows, k, v))


@pytest.mark.parametrize(
    ("tail", "limit", "large"),
    [("f16", 65504.0, 65505.0), ("bf16", 3.3895313892515355e38, 3.4e38)],
)
def test_what_is_too_large_or_not_finite_is_noted(tail, limit, large):
    positions = np.array([30, 31, 32])
    tails, rows = Tails((tail, tail), (32, 32), positions), np.array([0, 1, 2], np.int32)
    k, v = normal(3, HEADS, 32), normal(3, HEADS, 32, seed=1)
    k[0, 0, 3], k[0, 1, 4], v[2, 0, 31] = large, -large, large
    v[1, 0, 5], k[2, 1, 1] = np.nan, -np.inf
    kernels.write(
        *tails.arguments(), torch.from_numpy(rows), torch.from_numpy(k), torch.from_numpy(v),
        tails.flags, (tail, tail),
    )  # fmt: skip
    assert tails.flags[0] == 1
    assert tails.flags[1] in (31, 32)
    assert tails.flags[2] == 3
    v[1, 0, 5], k[2, 1, 1] = 0, 0
    np.testing.assert_array_equal(
        tails.pool, tails.expected(rows, np.clip(k, -limit, limit), np.clip(v, -limit, limit))
    )
