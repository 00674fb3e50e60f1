"""What policies need of the GPU: attention row by row, statistics, and pages made of others.

What a policy has kept lies in the process's memory, where records point to it. It is small, and
copied to the device for each batch, or for each row where the policy decides between rows; sums of
attention and queries come back the same way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pykv.backends.base import F32, I64, PAGE, Keeper, Move, Policy, Rope, Step
from pykv.kernels import encode_triton, move_triton

if TYPE_CHECKING:
    from pykv.backends.cuda_attention import CudaAttention
    from pykv.backends.cuda_maps import LayerMaps

SCRATCH_BYTES = 64 << 20  # of pages that are decoded at a time to make others
ROWS_AT_ONCE = 8  # of a window whose every share is written out
TABLES, WORDS, ALIVE, SUMS, QUERIES = (0, 1), 8, 9, 10, 11  # of a record


def _at(address: int, count: int, kind: Any) -> Any:
    """So many numbers of the process's memory, as an array that can be written."""
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind)


def put(addresses: I64, rows: torch.Tensor) -> None:
    """Bring rows of float32 from the device to addresses [n] of the process's memory."""
    for address, row in zip(addresses.tolist(), rows.cpu().numpy(), strict=True):
        _at(address, row.size, np.float32)[:] = row.reshape(-1)


class Mirror:
    """What records point to in the process's memory, on the device; they point there from then on.

    rows: records int64 [RECORD], changed in place, and their KV heads. `plain`: tables of rows that
    no policy acts on lie in that memory too. All rows are described as a policy's are.
    """

    def __init__(
        self, device: torch.device, rows: Sequence[tuple[I64, int]], plain: bool = False
    ) -> None:
        self._places: dict[int, int] = {}
        self._parts: list[I64] = []
        self._size = self._n_sums = 0
        self._wanted: list[tuple[int, int, int]] = []  # address of sums, their first, their number
        found = [self._place(record, n_kv, plain) for record, n_kv in rows]
        self.far = torch.empty(max(self._size, 1), dtype=torch.int64, device=device)
        if self._parts:
            self.far.copy_(torch.from_numpy(np.concatenate(self._parts)))
        # what a head has no entry for counts as nothing
        self.sums = torch.zeros(max(self._n_sums, 1), dtype=torch.float32, device=device)
        for (record, _), places in zip(rows, found, strict=True):
            for word, place in places.items():
                record[word] = self.far.data_ptr() + 8 * place
            if record[SUMS]:
                first = self._places[int(record[SUMS])]
                record[SUMS] = self.sums.data_ptr() + 4 * first

    def _place(self, record: I64, n_kv: int, plain: bool) -> dict[int, int]:
        """Where each word's array will lie."""
        room, kept = n_kv * int(record[2]), bool(record[WORDS])
        places = {}
        if kept or plain:
            places = {word: self._copy(int(record[word]), room) for word in TABLES}
        if kept:
            places[WORDS] = self._copy(int(record[WORDS]), 2 * n_kv)
            places[ALIVE] = self._copy(int(record[ALIVE]), room)
        else:
            places[WORDS] = self._add(np.tile(record[[5, 4]], n_kv))
            places[ALIVE] = self._add(np.full(room, -1, np.int64))
        if record[SUMS]:
            self._places[int(record[SUMS])] = self._n_sums
            self._wanted.append((int(record[SUMS]), self._n_sums, room * PAGE))
            self._n_sums += room * PAGE
        return places

    def _copy(self, address: int, count: int) -> int:
        if address not in self._places:
            self._places[address] = self._add(_at(address, count, np.int64))
        return self._places[address]

    def _add(self, words: I64) -> int:
        self._parts.append(words)
        self._size += len(words)
        return self._size - len(words)

    def collect(self) -> None:
        """Bring the sums to where the records pointed."""
        if self._wanted:
            sums = self.sums.cpu().numpy()
            for address, first, count in self._wanted:
                _at(address, count, np.float32)[:] = sums[first : first + count]


def mirrored(step: Step, records: I64, device: torch.device) -> Mirror | None:
    """The mirror of a batch whose rows run together; their records [layers, T, RECORD] change."""
    policy = step.policy
    if policy is None or policy.keeper is not None or not policy.layers:
        return None
    rows = []
    for layer in sorted(policy.layers):
        for row in range(step.n_rows):
            if step.records[layer, row, WORDS]:  # tables of others have copies on the device
                records[layer, row] = step.records[layer, row]
            rows.append((records[layer, row], step.shapes[layer].n_kv))
    return Mirror(device, rows)


@dataclass
class OfRows:
    """What rows under a policy ask of a launch."""

    records: torch.Tensor  # of the rows of q
    q_sinks: torch.Tensor | None  # queries that sinks meet, if they are others
    chunks: int  # room for each row
    sums: bool = False  # whether shares are wanted, where records say
    each: torch.Tensor | None = None  # where every query head's go, f32 [rows, H, capacity, 64]


def policy_of(step: Step, layer: int) -> Policy | None:
    """The policy that acts on a layer in this batch."""
    policy = step.policy
    return policy if policy is not None and layer in policy.layers else None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Heads [T, heads, D], each pair turned by its row's angle [T, pairs]."""
    half, out = rope.n_rot // 2, x.clone()
    if rope.neox:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b, cos, sin = x[..., first], x[..., second], cos[:, None], sin[:, None]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attend(
    batch: CudaAttention, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    rope: Rope | None, scale: float,
) -> torch.Tensor:  # fmt: skip
    """One layer's attention under a policy, [T, H * D]."""
    step, shape, formats = batch.step, batch.step.shapes[layer], batch.step.formats[layer]
    policy, at_read = policy_of(step, layer), formats.position == "read"
    if policy is None:
        raise ValueError(f"no policy acts on layer {layer}")
    q_sinks = None
    if rope is not None:
        if policy.sink_places is not None:
            q_sinks = rotated(q, *batch.angles(rope, "sinks"), rope)
        q = rotated(q, *batch.angles(rope, "read" if at_read else "write"), rope)
        if not at_read:
            k = rotated(k, *batch.angles(rope, "write"), rope)
    fixed, turns = batch.turns(layer, rope)
    out = torch.empty(len(q), shape.n_head * shape.d_v, dtype=torch.float32, device=batch.device)
    rows = Rows(batch, layer, q, q_sinks, k, v, out, turns, scale, fixed, policy.sums)
    batch.keep_queries(layer, q, scale)
    if policy.keeper is not None:
        rows.one_by_one(policy.keeper)
    else:
        rows.together()
    return out


@dataclass
class Rows:
    """A layer's rows on their way through attention, queries and keys turned."""

    batch: CudaAttention
    layer: int
    q: torch.Tensor
    q_sinks: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    turns: tuple[torch.Tensor, ...]
    scale: float
    fixed: dict[str, Any]
    sums: bool

    def __post_init__(self) -> None:
        self.q_pages = self.batch.key_queries(self.layer, self.q)

    def together(self) -> None:
        """All rows, round by round; the policy decides after the batch."""
        batch, layer = self.batch, self.layer
        records = batch.changing.far["records"][layer]
        self._write(records, batch.changing.far["rows"], slice(None))
        for number in range(len(batch.step.rounds)):
            for rows in batch.some_rows(number):
                self._attend(rows, records, slice(None))
            batch.encode_round(number, layer)

    def one_by_one(self, keeper: Keeper) -> None:
        """A row after the other, the policy deciding in between.

        Rows of sequences that keep every token yet may be among them.
        """
        batch, layer = self.batch, self.layer
        n_kv, device = batch.step.shapes[layer].n_kv, batch.device
        first = torch.zeros(1, dtype=torch.int32, device=device)
        for number, round_ in enumerate(batch.step.rounds):
            for row in round_.rows.tolist():
                batch.step.check_cancelled()
                batch.move(keeper.before(layer, row))
                record = batch.record(layer, row)
                mirror = Mirror(device, [(record, n_kv)])
                far, own = torch.from_numpy(record[None]).to(device), slice(row, row + 1)
                self._write(far, first, own)
                self._attend(first, far, own)
                mirror.collect()
                keeper.after(layer, row)
            batch.encode_round(number, layer)

    def _write(self, records: torch.Tensor, rows: torch.Tensor, own: slice) -> None:
        self.batch.write(self.layer, records, rows, self.k[own], self.v[own])

    def _attend(self, rows: torch.Tensor, records: torch.Tensor, own: slice) -> None:
        q_sinks = None if self.q_sinks is None else self.q_sinks[own]
        kept = OfRows(records, q_sinks, self.batch.room(self.layer), self.sums)
        self.batch.attend_rows(
            self.layer, rows, self.q[own], self.q_pages[own], self.out[own], self.turns,
            self.scale, self.fixed, kept,
        )  # fmt: skip


def window_sums(batch: CudaAttention, layer: int, queries: F32) -> F32:
    """See Backend.window_sums.  Keys that are turned when they are read have no such policy."""
    step, shape, device = batch.step, batch.step.shapes[layer], batch.device
    capacity = int(step.records[layer, 0, 2])
    total = torch.zeros(shape.n_head, capacity, PAGE, dtype=torch.float32, device=device)
    q = torch.from_numpy(np.ascontiguousarray(queries)).to(device)
    records = step.records[layer].copy()
    mirror = Mirror(device, [(record, shape.n_kv) for record in records], plain=True)
    far, (fixed, turns) = torch.from_numpy(records).to(device), batch.turns(layer, None)
    for first in range(0, len(q), ROWS_AT_ONCE):
        step.check_cancelled()
        own = slice(first, min(first + ROWS_AT_ONCE, len(q)))
        x = q[own]
        each = torch.zeros(len(x), *total.shape, dtype=torch.float32, device=device)
        out = torch.empty(len(x), shape.n_head * shape.d_v, dtype=torch.float32, device=device)
        rows = torch.arange(len(x), dtype=torch.int32, device=device)
        batch.attend_rows(
            layer, rows, x, batch.key_queries(layer, x), out, turns, 1.0, fixed,
            OfRows(far[own], None, batch.room(layer), True, each),
        )  # fmt: skip
        total += each.sum(0)
    found: F32 = total.cpu().numpy()
    del mirror  # until here kernels read it
    return found


def move(
    device: torch.device, pool: torch.Tensor, maps: Sequence[LayerMaps], step: Step,
    moves: Sequence[Move],
) -> None:  # fmt: skip
    """Make pages of tokens of other pages."""
    for work in moves:
        shape, names = step.shapes[work.layer], step.formats[work.layer]
        of, d = maps[work.layer], (shape.d_k, shape.d_v)[work.side]
        width, page, tail, matrix, extra = (
            (of.d_k, names.page_k, names.tail_k, of.matrix_k, of.extra_k),
            (of.d_v, names.page_v, names.tail_v, of.matrix_v, of.extra_v),
        )[work.side]
        old, new = {"tail": (tail, tail), "seal": (tail, page), "page": (page, page)}[work.kind]
        d = width if work.kind == "page" else d
        mapped = matrix if work.kind == "seal" else None
        at_once = max(1, SCRATCH_BYTES // (work.sources.shape[1] * PAGE * d * 4))
        for first in range(0, len(work.pages), at_once):
            part = slice(first, first + at_once)
            heads = torch.from_numpy(work.heads[part]).to(device)
            rows = _gathered(device, pool, work, part, heads, extra, old, d)
            if mapped is not None:
                rows = torch.matmul(rows, mapped if len(mapped) == 1 else mapped[heads])
            _encode(device, pool, work, part, extra[heads], new, tail, rows)


def _gathered(
    device: torch.device, pool: torch.Tensor, work: Move, part: slice, heads: torch.Tensor,
    extra: torch.Tensor, name: str, d: int,
) -> torch.Tensor:  # fmt: skip
    """The tokens that new pages are made of, f32 [n, 64, d]; zeros where there is none."""
    sources = torch.from_numpy(np.ascontiguousarray(work.sources[part])).to(device)
    picks = torch.from_numpy(work.picks[part]).to(device).long()[:, :, None]
    n, many = sources.shape
    pages = torch.empty(n, many * PAGE, d, dtype=torch.float32, device=device)
    side, of_pages = ("key", "value")[work.side], heads.repeat_interleave(many)
    move_triton.decode(pool, sources.reshape(-1), of_pages, extra, pages, name, side, d)
    rows = pages.gather(1, picks.clamp(min=0).expand(-1, -1, d))
    return torch.where(picks >= 0, rows, torch.zeros_like(rows))


def _encode(
    device: torch.device, pool: torch.Tensor, work: Move, part: slice, extra: torch.Tensor,
    name: str, tail: str, rows: torch.Tensor,
) -> None:  # fmt: skip
    """Write rows f32 [n, 64, d], each of a KV head with its own `extra`, to the new pages."""
    n = len(rows)
    # encoders put the new page in a table, which here is nobody's
    table = torch.zeros(n, dtype=torch.int64, device=device)
    entries = table.data_ptr() + 8 * np.arange(n, dtype=np.int64)
    moves = torch.from_numpy(np.stack([entries, work.pages[part]], 1)).to(device)
    side, d = ("key", "value")[work.side], rows.shape[2]
    encode_triton.encode(pool, moves, extra.contiguous(), name, side, d, n, tail, rows.contiguous())
