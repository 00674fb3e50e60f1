"""The oracle: plain NumPy in float32, no compiled kernels. Slow, short, obviously right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pykv.backends import latent
from pykv.backends import reference_kept as kept
from pykv.backends.base import (
    F32,
    I64,
    PAGE,
    Array,
    Backend,
    CacheFormats,
    LayerShape,
    Move,
    Rope,
    Segment,
    Step,
    WeightSource,
)
from pykv.backends.plan import decode
from pykv.backends.reference_pages import (
    finder,
    map_of,
    numbers_of,
    page_at,
    read_page,
    table_at,
    write_page,
)
from pykv.errors import NumericsError
from pykv.formats.base import Side
from pykv.formats.coded import find as cache_format


class ReferenceBackend(Backend):
    """Every verb runs at once, on float32 arrays."""

    name = "reference"
    keeps = True

    def __init__(self) -> None:
        self.plan = ["reference backend: plain NumPy, float32"]
        self._rope: Rope | None = None  # of the layer that runs, if its keys are turned when read

    def load(self, tensor: WeightSource) -> F32:  # noqa: D102
        return decode(tensor)

    load_vector = load

    def prepare(self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]) -> None:  # noqa: D102
        self.plan.append(f"cache formats: {', '.join(sorted({str(f) for f in formats}))}")

    def run(self, graph: Any, step: Step) -> F32:  # noqa: D102
        if step.policy is not None:
            self.move(step, step.policy.moves)
        logits: F32 = graph.forward(step)
        return logits

    def prepare_moves(  # noqa: D102
        self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]
    ) -> None:
        pass

    def move(self, step: Step, moves: Sequence[Move]) -> None:  # noqa: D102
        for move in moves:
            kept.make_pages(step, move)

    def window_sums(self, step: Step, layer: int, queries: F32) -> F32:  # noqa: D102
        rows = range(len(queries))
        shares = [
            kept.attend(step, layer, i, queries[i], queries[i], None, self._turn)[1] for i in rows
        ]
        total: F32 = np.sum(shares, axis=0)
        return total

    def array(self, x: F32) -> F32:  # noqa: D102
        return np.array(x, np.float32)

    def embed(self, weight: F32, step: Step) -> F32:  # noqa: D102
        return weight[step.tokens]

    def linear(self, x: F32, weight: F32, add: F32 | None = None) -> F32:  # noqa: D102
        with np.errstate(invalid="ignore"):  # as in _attend
            y: F32 = x @ weight.T
        return y if add is None else y + add

    load_heads = load

    def heads_linear(self, x: F32, weight: F32) -> F32:  # noqa: D102
        with np.errstate(invalid="ignore"):  # as in _attend
            return np.ascontiguousarray(np.einsum("thi,hoi->tho", x, weight, optimize=True))

    def columns(self, x: F32, first: int, stop: int) -> F32:  # noqa: D102
        return np.ascontiguousarray(x[..., first:stop])

    def concat(self, x: F32, y: F32) -> F32:  # noqa: D102
        return np.concatenate([x, y], axis=-1)

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:  # noqa: D102
        mean = np.mean(x * x, axis=-1, keepdims=True)
        y: F32 = x / np.sqrt(mean + np.float32(eps)) * weight
        return y

    def swiglu(self, gate: F32, up: F32) -> F32:  # noqa: D102
        with np.errstate(over="ignore"):
            y: F32 = gate / (1 + np.exp(-gate)) * up
        return y

    def geglu(self, gate: F32, up: F32) -> F32:  # noqa: D102
        with np.errstate(over="ignore"):
            u = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
        y: F32 = np.float32(0.5) * gate * (1 + np.tanh(u)) * up
        return y

    def add(self, x: F32, y: F32) -> F32:  # noqa: D102
        return x + y

    def bias(self, x: F32, weight: F32) -> F32:  # noqa: D102
        return x + weight

    def scale(self, x: F32, factor: float) -> F32:  # noqa: D102
        return x * np.float32(factor)

    def softcap(self, x: F32, limit: float) -> F32:  # noqa: D102
        y: F32 = np.float32(limit) * np.tanh(x / np.float32(limit))
        return y

    def take_rows(self, x: F32, step: Step) -> F32:  # noqa: D102
        return x[step.outputs]

    def attention(  # noqa: D102
        self, step: Step, layer: int, q: F32, k: F32, v: F32, rope: Rope | None, scale: float
    ) -> F32:
        step.check_cancelled()
        at_read = step.formats[layer].position == "read"
        policy = step.policy if step.policy and layer in step.policy.layers else None
        positions = step.positions
        places = sink_places = positions
        if policy is not None and policy.sink_places is not None:
            sink_places = policy.sink_places
        if policy is not None and policy.places is not None and at_read:
            places = policy.places
        q_sinks, factor = q, np.float32(scale)
        if rope is not None:
            q_sinks, q = self._turn(q, sink_places, rope), self._turn(q, places, rope)
            k = k if at_read else self._turn(k, positions, rope)
        self._rope = rope if at_read else None
        q, q_sinks = q * factor, q_sinks * factor
        kept.keep_queries(step, layer, q)
        shape = step.shapes[layer]
        sides = [k] if shape.shared else [k, v]
        out = np.empty((*q.shape[:2], shape.d_v), np.float32)
        for round_ in step.rounds:
            for segment in round_.segments:
                if policy is None:
                    self._write(step, layer, segment, sides)
                    self._attend(step, layer, segment, q, out)
                    continue
                for row in range(segment.first, segment.first + segment.count):
                    self._attend_row(step, layer, row, (q, q_sinks, k, v), out)
            if round_.moves:
                self._encode(step, layer, round_.moves[layer])
        return out.reshape(len(q), -1)

    def _attend_row(
        self, step: Step, layer: int, row: int, qkv: tuple[F32, F32, F32, F32], out: F32
    ) -> None:
        """One row of a layer under a policy; other sequences' rows may be in the batch too."""
        step.check_cancelled()
        q, q_sinks, k, v = qkv
        policy = step.policy
        keeper = None if policy is None else policy.keeper
        if keeper is not None:
            self.move(step, keeper.before(layer, row))
        if step.records[layer, row, 8]:
            self._check(step, layer, np.array([row]), [k, v])
            kept.write(step, layer, row, k[row], v[row])
        else:
            self._write(step, layer, Segment(row, 1), [k, v])
        out[row], shares = kept.attend(
            step, layer, row, q[row], q_sinks[row], self._rope, self._turn
        )
        if step.records[layer, row, 10]:
            kept.tell_sums(step, layer, row, shares)
        if keeper is not None:
            keeper.after(layer, row)

    @staticmethod
    def _turn(x: F32, positions: I64, rope: Rope) -> F32:
        cos, sin = (t[:, None, :] for t in rope.tables(positions))
        at, half, end = rope.first, rope.first + rope.n_rot // 2, rope.first + rope.n_rot
        first, second = (slice(at, half), slice(half, end)) if rope.neox else (
            slice(at, end, 2), slice(at + 1, end, 2))  # fmt: skip
        y = x.copy()
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., first] * sin + x[..., second] * cos
        return y

    @staticmethod
    def _check(step: Step, layer: int, rows: I64, sides: list[F32]) -> None:
        """Raise NumericsError for a key or value that is not finite."""
        for x in sides:
            bad = ~np.isfinite(x[rows]).all(axis=(1, 2))
            if bad.any():
                position = step.positions[rows[bad][0]]
                raise NumericsError(
                    f"layer {layer}, position {position}: a key or value is not a finite number"
                )

    def _write(self, step: Step, layer: int, segment: Segment, sides: list[F32]) -> None:
        """Put a segment's keys and values in the tail, a page at a time."""
        sinks = int(step.records[layer, segment.first, 3])
        rows = np.arange(segment.first, segment.first + segment.count)
        self._check(step, layer, rows, sides)
        for side, x in enumerate(sides):
            find = finder(step, layer, segment.first, side)
            entries = np.where(
                step.positions[rows] < sinks, 0, 1 + (step.positions[rows] - sinks) // PAGE
            )
            for entry in np.unique(entries):
                mine = rows[entries == entry]
                slot = step.positions[mine] - (sinks + (entry - 1) * PAGE if entry else 0)
                for head in range(x.shape[1]):
                    write_page(find, side, head, int(entry), slot, x[mine, head])

    def _read(self, step: Step, layer: int, row: int, side: int, head: int, n: int) -> F32:
        """Keys or values of tokens 0 to n - 1 of a row's sequence; freed pages read as NaN."""
        shape = step.shapes[layer]
        d, sinks = (shape.d_k, shape.d_v)[side], int(step.records[layer, row, 3])
        lowest = int(step.records[layer, row, 6])
        cells = np.full((n, d), np.nan, np.float32)
        for entry in range(0 if sinks else 1, 2 + max(n - 1 - sinks, -1) // PAGE):
            start = sinks + (entry - 1) * PAGE if entry else 0
            stop = min(start + (PAGE if entry else sinks), n)
            if stop > max(lowest, start):
                stored = read_page(step, layer, row, side, head, entry)
                cells[start:stop] = stored[: stop - start]
        return cells

    def _attend(self, step: Step, layer: int, segment: Segment, q: F32, out: F32) -> None:
        shape = step.shapes[layer]
        group = shape.n_head // shape.n_kv
        rows = slice(segment.first, segment.first + segment.count)
        positions = step.positions[rows]
        n = int(positions[-1]) + 1
        low = step.records[layer, rows, 6][:, None]
        cells = np.arange(n)[None, :]
        visible = (cells <= positions[:, None]) & (cells >= low)
        for g in range(shape.n_kv):
            keys = self._read(step, layer, segment.first, 0, g, n)
            values = keys[:, : shape.d_v]
            if not shape.shared:
                values = self._read(step, layer, segment.first, 1, g, n)
            if self._rope is not None:
                keys = self._turn(keys[:, None], cells[0], self._rope)[:, 0]
            seen = visible.any(0)
            keys, values = keys[seen], values[seen]
            # keys and values are finite, but a BLAS may load past a small array's end, and what it
            # meets there can set the processor's flag for invalid numbers
            with np.errstate(invalid="ignore"):
                for h in range(g * group, (g + 1) * group):
                    scores = np.where(visible[:, seen], q[rows, h] @ keys.T, -np.inf)
                    p = np.exp(scores - scores.max(-1, keepdims=True))
                    out[rows, h] = (p / p.sum(-1, keepdims=True)) @ values

    def _encode(self, step: Step, layer: int, moves: tuple[I64, I64]) -> None:
        shape, names = step.shapes[layer], step.formats[layer]
        sides: tuple[tuple[int, str, str, Side], ...] = (
            (shape.d_k, names.tail_k, names.page_k, "key"),
            (shape.d_v, names.tail_v, names.page_v, "value"),
        )
        for (d, tail_name, page_name, side), side_moves in zip(sides, moves, strict=True):
            tail, page = cache_format(tail_name), cache_format(page_name)
            if side == "key":
                page = latent.key_format(page_name, shape)
            for i, (entry_address, new) in enumerate(side_moves):
                numbers = numbers_of(step, layer, int(side == "value"), i % shape.n_kv)
                mapped = map_of(step, layer, int(side == "value"), i % shape.n_kv)
                entry = table_at(int(entry_address), 1, 1)
                old = page_at(int(entry[0, 0]), tail.page_bytes(d, side, PAGE))
                width = d if mapped is None else mapped.shape[1]
                fresh = page_at(int(new), page.page_bytes(width, side, PAGE))
                decode_page: Any = tail.decode_keys if side == "key" else tail.decode_values
                encode: Any = page.encode_keys if side == "key" else page.encode_values
                cells = decode_page(old, d, PAGE)
                fresh[:] = encode(cells if mapped is None else cells @ mapped, **numbers)
                entry[0, 0] = new

    def close(self) -> None:  # noqa: D102
        self.plan = []


def create(**_: Array) -> ReferenceBackend:
    """A reference backend; it takes no settings."""
    return ReferenceBackend()
