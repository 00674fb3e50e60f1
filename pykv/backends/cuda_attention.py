"""Attention of one batch on the GPU: writes, row and prompt kernels, encoding, in the right order.

What changes from batch to batch lies in device memory at addresses that stay, so that the same
launches, captured once, serve every later batch of as many rows. Pages that a decoding step fills
are encoded after it, layer by layer, since nothing of it sees them encoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pykv.backends import cuda_kept
from pykv.backends.base import I64, PAGE, LayerShape, Move, Rope, Step
from pykv.backends.cuda_kept import OfRows
from pykv.backends.cuda_maps import LayerMaps
from pykv.backends.cuda_memory import Changing, DeviceMemory, Tables, capacity_for
from pykv.backends.page_maps import Turns
from pykv.errors import NumericsError
from pykv.kernels import (
    attention_triton,
    encode_triton,
    launch_triton,
    statistics_triton,
    write_triton,
)
from pykv.kernels.jit_triton import FUSED

MOST_ROWS = 8  # that decoding takes at a time
PROGRAMS = 16  # of decoding, about so many for each multiprocessor: a few at a time, often enough


def upto(n: int) -> int:
    """The next multiple of 32."""
    return (n + 31) // 32 * 32


def chunks_for(n_ctx: int) -> int:
    """Chunks of a row's partial sums, at most."""
    return -(-capacity_for(n_ctx) // int(attention_triton.CHUNK))


def chunks_of(records: I64) -> int:
    """Chunks that the longest row of records [..., RECORD] sees."""
    entries = 2 + int(records[..., 5].max(initial=0)) // PAGE
    return -(-entries // int(attention_triton.CHUNK))


def sums_bytes(shape: LayerShape, rows: int, n_ctx: int) -> int:
    """Of partial sums and their statistics, where pages are mapped."""
    return rows * shape.n_head * chunks_for(n_ctx) * (2 * upto(shape.d_v) + 2) * 4


def _programs(device: torch.device) -> int:
    """Programs that share a batch's pages; one is enough where they run one after the other."""
    if device.type != "cuda":
        return 1
    return PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


Moves = list[list[list[slice]]]  # of each round, layer and side: where its moves lie


class CudaAttention:
    """Launches a batch's attention.

    `maps` are the layers'. `moves` and `far_moves`, i64 [n, 2] on the device, say which pages are
    encoded between rounds; without them none is.
    """

    def __init__(
        self, device: torch.device, step: Step, maps: Sequence[LayerMaps], tables: Tables,
        deterministic: bool,
    ) -> None:  # fmt: skip
        self.device, self._maps, self._deterministic = device, maps, deterministic
        self._blank = torch.zeros(1, dtype=torch.float32, device=device)
        self.step = step
        self._pool = step.memory.pool if isinstance(step.memory, DeviceMemory) else self._blank
        self.moves: Moves = []
        self.far_moves = torch.empty(0, 2, dtype=torch.int64, device=device)
        self._ropes: dict[tuple[int, str], tuple[Rope, Changing]] = {}
        self._turns: dict[int, tuple[Rope, tuple[torch.Tensor, ...]]] = {}
        # a text under a policy may be longer than the context
        self._chunks = max(chunks_for(step.n_ctx), chunks_of(step.records))
        self._queries: list[tuple[I64, torch.Tensor]] = []  # that a policy wants, and where
        self._partial: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        arrays: dict[str, Any] = {
            "tokens": step.tokens, "positions": step.positions, "outputs": step.outputs,
            "records": step.records, "flags": np.zeros((len(step.shapes), 4), np.int64),
            "rows": np.arange(step.n_rows, dtype=np.int32),
            **{f"rows{i}": r.rows for i, r in enumerate(step.rounds)},
        }  # fmt: skip
        self.changing = Changing(device, arrays)
        self.set(step, tables)

    def set(self, step: Step, tables: Tables) -> None:
        """Take over another batch of as many rows."""
        self.step = step
        tables.update(step)
        host = self.changing.host
        host["tokens"][:], host["positions"][:] = step.tokens, step.positions
        host["outputs"][:], host["flags"][:] = step.outputs, 0
        tables.records(step, host["records"])
        self._mirror = cuda_kept.mirrored(step, host["records"], self.device)
        for (_, kind), (rope, turned) in self._ropes.items():
            turned.host["cos"][:], turned.host["sin"][:] = rope.tables(self._places(kind))
            turned.send()
        self.changing.send()

    def check(self) -> list[tuple[int, int]]:
        """Layers and counts of clamped values.  Raises NumericsError: a value is no number."""
        flags = self.changing.far["flags"].cpu().numpy()
        bad = np.flatnonzero(flags[:, 0])
        if len(bad):
            raise NumericsError(
                f"layer {bad[0]}, position {flags[bad[0], 1]}: a key or value is not a finite "
                "number; the model file may be damaged"
            )
        return [(int(layer), int(flags[layer, 2])) for layer in np.flatnonzero(flags[:, 2])]

    def collect(self) -> None:
        """Bring what a policy wants to know to where the records say."""
        if self._mirror is not None:
            self._mirror.collect()
        for addresses, queries in self._queries:
            cuda_kept.put(addresses, queries)
        self._queries = []

    # launching

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """One layer's attention, [T, H * D]; q and k are turned where they lie."""
        if cuda_kept.policy_of(self.step, layer) is not None:
            return cuda_kept.attend(self, layer, q, k, v, rope, scale)
        shape, formats = self.step.shapes[layer], self.step.formats[layer]
        records, flags = (self.changing.far[name][layer] for name in ("records", "flags"))
        tails, at_read = (formats.tail_k, formats.tail_v), formats.position == "read"
        cos, sin = (None, None) if rope is None else self.angles(rope, "write")
        n_rot, neox = (0, False) if rope is None else (rope.n_rot, rope.neox)
        # later rounds' tokens lie in tail pages of their own, and no query sees what follows it
        write_triton.rope_write(
            self._pool, records, self.changing.far["rows"], q, k, v, cos, sin, flags, tails,
            n_rot, neox, not at_read,
        )  # fmt: skip
        self.keep_queries(layer, q, scale)
        q_pages = self.key_queries(layer, q)
        out = self._empty(len(q), shape.n_head * shape.d_v)
        fixed, turns = self.turns(layer, rope)
        few = len(q) <= MOST_ROWS or self._deterministic
        for number, round_ in enumerate(self.step.rounds):
            if few:
                for part in self.some_rows(number):
                    self.attend_rows(layer, part, q, q_pages, out, turns, scale, fixed)
            else:
                for s in round_.segments:
                    mine = slice(s.first, s.first + s.count)
                    self._attend_prompt(layer, mine, q, q_pages, out, turns, scale, fixed)
            self.encode_round(number, layer)
        return out

    def some_rows(self, number: int) -> Iterator[torch.Tensor]:
        """A round's rows, as many at a time as decoding takes."""
        rows = self.changing.far[f"rows{number}"]
        for first in range(0, len(rows), MOST_ROWS):
            yield rows[first : first + MOST_ROWS]

    def record(self, layer: int, row: int) -> I64:
        """A row's record; its tables lie in the process's memory where a policy has kept them."""
        own: I64 = self.step.records[layer, row]
        known = own if own[cuda_kept.WORDS] else self.changing.host["records"][layer, row]
        return known.copy()

    def encode_round(self, number: int, layer: int) -> None:
        """Encode the pages of a layer that are full after a round, if they are to be now."""
        if self.moves and self.moves[number]:
            self.encode(layer, [self.far_moves[part] for part in self.moves[number][layer]])

    def write(
        self, layer: int, records: torch.Tensor, rows: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:  # fmt: skip
        """Put rows' keys and values, as they are, where a policy gave them their places."""
        formats, flags = self.step.formats[layer], self.changing.far["flags"][layer]
        tails = formats.tail_k, formats.tail_v
        write_triton.write(self._pool, records, rows, k, v, flags, tails, kept=True)

    def move(self, moves: Sequence[Move]) -> None:
        """Make pages of tokens of other pages."""
        cuda_kept.move(self.device, self._pool, self._maps, self.step, moves)

    def keep_queries(self, layer: int, q: torch.Tensor, scale: float) -> None:
        """Copy turned queries that a policy wants, to be brought to it after the batch."""
        policy = self.step.policy
        if policy is not None and policy.queries and self.step.shapes[layer].window == 0:
            rows = np.flatnonzero(self.step.records[layer, :, cuda_kept.QUERIES])
            if len(rows):
                places = self.step.records[layer, rows, cuda_kept.QUERIES]
                self._queries.append((places, q[torch.from_numpy(rows)] * scale))

    def _places(self, kind: str) -> I64:
        """Positions by which queries are turned: their own, or by place; see base.Policy."""
        policy = self.step.policy
        if policy is None or kind == "write":
            return self.step.positions
        places = policy.sink_places if kind == "sinks" else policy.places
        return self.step.positions if places is None else places

    def angles(self, rope: Rope, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin f32 [T, pairs] of the batch, by positions of a kind."""
        if (id(rope), kind) not in self._ropes:
            cos, sin = rope.tables(self._places(kind))
            turned = Changing(self.device, {"cos": cos, "sin": sin})
            turned.send()
            self._ropes[id(rope), kind] = (rope, turned)
        far = self._ropes[id(rope), kind][1].far
        return far["cos"], far["sin"]

    def turns(self, layer: int, rope: Rope | None) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Compile-time parameters of a layer's attention, and angles for keys turned when read."""
        fixed, at_read = self._maps[layer].fixed, self.step.formats[layer].position == "read"
        neox = rope is not None and rope.neox
        if rope is None or not at_read:
            return fixed | {"N_ROT": 0, "NEOX": neox}, (self._blank,) * 4
        return fixed | {"N_ROT": rope.n_rot, "NEOX": neox}, self._read_angles(rope)

    def _read_angles(self, rope: Rope) -> tuple[torch.Tensor, ...]:
        """Angles for keys that are stored before RoPE, for every entry of a table."""
        if id(rope) not in self._turns:
            sinks = int(self.step.records[0, 0, 3])
            turns = Turns(rope, sinks, self._chunks * int(attention_triton.CHUNK))
            far = tuple(torch.from_numpy(t).to(self.device) for t in turns.tables)
            self._turns[id(rope)] = (rope, far)
        return self._turns[id(rope)][1]

    def key_queries(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, D] as the layer's key pages want them."""
        return self._turned(q, self._maps[layer].matrix_k)

    def _turned(self, x: torch.Tensor, matrix: torch.Tensor | None) -> torch.Tensor:
        """Queries [T, H, D] as the key pages want them: each KV head's group through its map."""
        if matrix is None:
            return x
        if not self._deterministic:
            return self._mapped(x, matrix)
        # cuBLAS adds up in an order that depends on how many rows there are
        full = x.new_zeros(-(-len(x) // MOST_ROWS) * MOST_ROWS, *x.shape[1:])
        full[: len(x)] = x
        parts = (full[i : i + MOST_ROWS] for i in range(0, len(full), MOST_ROWS))
        return torch.cat([self._mapped(part, matrix) for part in parts])[: len(x)]

    def _mapped(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        by_head = x.reshape(len(x), len(matrix), -1, x.shape[2])
        return torch.einsum("tghd,gdr->tghr", by_head, matrix).reshape(*x.shape[:2], -1)

    def room(self, layer: int) -> int:
        """Chunks of a row under a policy, which may be more than at the batch's beginning."""
        return max(self._chunks, chunks_of(self.step.records[layer]))

    def _sums(self, layer: int, rows: int, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for partial sums of some rows; layers follow each other and share it."""
        n, size = rows * self.step.shapes[layer].n_head * chunks, self._maps[layer].size
        if (n, size) not in self._partial:
            self._partial[n, size] = self._empty(n * size), self._empty(n * 2)
        return self._partial[n, size]

    def _empty(self, *shape: int) -> torch.Tensor:
        # whatever type and device an application has made the default
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def attend_rows(
        self, layer: int, rows: torch.Tensor, q: torch.Tensor, q_pages: torch.Tensor,
        out: torch.Tensor, turns: tuple[torch.Tensor, ...], scale: float, fixed: dict[str, Any],
        kept: OfRows | None = None,
    ) -> None:  # fmt: skip
        """Launches for some rows; `kept`: what a policy asks of them, where one acts."""
        shape, maps, count = self.step.shapes[layer], self._maps[layer], len(rows)
        group = shape.n_head // shape.n_kv
        records, chunks, q_sinks = self.changing.far["records"][layer], self._chunks, q
        if kept is not None:
            records, chunks = kept.records, kept.chunks
            q_sinks = q if kept.q_sinks is None else kept.q_sinks
        partial, stats = self._sums(layer, count, chunks)
        splits = min(-(-_programs(self.device) // (count * shape.n_kv)), chunks)
        tile = {"GROUP": group, "TILE": max(launch_triton.LEAST_DOT, launch_triton.upto(group))}
        tile |= {"SINKS": q_sinks is not q}
        attention_triton.attend_rows[count, shape.n_kv, splits](
            self._pool, records, rows, q, q_pages, q_sinks, partial, stats, maps.extra_k,
            maps.extra_v, maps.extra_k.shape[1], maps.extra_v.shape[1], shape.n_kv, chunks, splits,
            scale * math.log2(math.e), *turns, KEPT=kept is not None, **tile, **fixed,
            **maps.of_rows, **FUSED,
        )  # fmt: skip
        pages = self._empty(len(q), shape.n_head, maps.d_v) if maps.mapped else out
        attention_triton.combine[count, shape.n_head](
            records, rows, partial, stats, out, pages, chunks, maps.size,
            **maps.combination, **FUSED,
        )  # fmt: skip
        if kept is not None and kept.sums:
            each = self._blank if kept.each is None else kept.each
            room = 0 if kept.each is None else kept.each.shape[2]
            statistics_triton.column_sums[count, shape.n_kv, splits](
                self._pool, records, rows, q, q_pages, q_sinks, stats, each, maps.extra_k,
                maps.extra_k.shape[1], shape.n_kv, chunks, splits, room, scale * math.log2(math.e),
                *turns, EACH=kept.each is not None, **tile, **statistics_triton.parameters(fixed),
                **maps.of_rows, **FUSED,
            )  # fmt: skip
        if maps.mapped:
            if count == len(q):  # they are all of the batch, in order
                out += self._back(layer, pages)
            else:
                index = rows.long()
                out.index_add_(0, index, self._back(layer, pages[index]))

    def _attend_prompt(
        self, layer: int, part: slice, q: torch.Tensor, q_pages: torch.Tensor, out: torch.Tensor,
        turns: tuple[torch.Tensor, ...], scale: float, fixed: dict[str, Any],
    ) -> None:  # fmt: skip
        shape, maps, count = self.step.shapes[layer], self._maps[layer], part.stop - part.start
        group = shape.n_head // shape.n_kv
        at_once = max(1, maps.lines // group)
        pages = self._empty(count, shape.n_head, maps.d_v) if maps.mapped else out
        attention_triton.attend_prompt[-(-count // at_once), shape.n_kv](
            self._pool, self.changing.far["records"][layer, part.start], q[part], q_pages[part],
            out[part], pages, maps.extra_k, maps.extra_v, maps.extra_k.shape[1],
            maps.extra_v.shape[1], count, shape.n_kv, shape.window, scale * math.log2(math.e),
            *turns, GROUP=group, QUERIES=at_once,
            LINES=max(launch_triton.LEAST_DOT, launch_triton.upto(at_once * group)),
            **fixed, **maps.of_prompts, **FUSED,
        )  # fmt: skip
        if maps.mapped:
            out[part] += self._back(layer, pages)

    def _back(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """What came out of mapped value pages, [T, H, R] -> [T, H * D]."""
        matrix = self._maps[layer].matrix_v
        back = None if matrix is None else matrix.transpose(1, 2)
        return self._turned(pages, back).reshape(len(pages), -1)

    def encode(self, layer: int, sides: Sequence[torch.Tensor]) -> None:
        """Encode full tail pages of keys and of values; their tables' entries point there then.

        sides: moves i64 [n, 2] on the device, of the layer's KV heads one after the other.
        """
        shape, formats, maps = self.step.shapes[layer], self.step.formats[layer], self._maps[layer]
        of_side = (
            ("key", formats.page_k, formats.tail_k, shape.d_k, maps.matrix_k, maps.extra_k),
            ("value", formats.page_v, formats.tail_v, shape.d_v, maps.matrix_v, maps.extra_v),
        )
        for moves, (side, name, tail, d, matrix, extra) in zip(sides, of_side, strict=True):
            if not len(moves):
                continue
            rows: Any = None
            if matrix is not None or name in launch_triton.FLOATS:
                rows = self._empty(len(moves), PAGE, d)
                encode_triton.gather_tails(self._pool, moves, rows, side, tail, d)
                if matrix is not None:
                    by_head = rows.reshape(-1, shape.n_kv, PAGE, d)
                    rows = torch.matmul(by_head, matrix).reshape(len(moves), PAGE, -1)
                    d = rows.shape[2]
            encode_triton.encode(self._pool, moves, extra, name, side, d, shape.n_kv, tail, rows)


def moves_of(step: Step, tables: Tables) -> tuple[I64, Moves]:
    """All moves of a batch, with the device's addresses, and where each layer's lie among them."""
    every = [np.empty((0, 2), np.int64)]
    places: Moves = []
    at = 0
    for round_ in step.rounds:
        places.append([])
        for layer in round_.moves:
            every += layer
            ends = at + len(layer[0]), at + len(layer[0]) + len(layer[1])
            places[-1].append([slice(at, ends[0]), slice(*ends)])
            at = ends[1]
    return tables.moves(step, np.concatenate(every)), places
