"""What a backend is told of a batch and the cache: shapes, formats, records, a policy's wishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pykv.errors import CancelledError
from pykv.formats.coded import HeadNumbers

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

PAGE = 64  # tokens in a page
RECORD = 16  # int64 words that describe one row of a batch to the kernels; see Step


class PageMemory(Protocol):
    """Where a store's pages lie.  An address counts `unit` bytes, and 0 is nobody's."""

    @property
    def unit(self) -> int: ...  # noqa: D102
    @property
    def reserved_bytes(self) -> int: ...  # noqa: D102
    def reserve(self, n_bytes: int) -> None: ...  # noqa: D102
    def slab(self, n_bytes: int) -> int: ...  # noqa: D102
    def copy(self, old: int, new: int, n_bytes: int) -> None: ...  # noqa: D102


class PageTables(Protocol):
    """A sequence's page tables; the object lives as long as the sequence."""

    @property
    def tables(self) -> I64: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class Rope:
    """A rotary embedding: which channels are paired, and by which angles they turn.

    Angle of pair i at position p: p * inv_freq[i]; cos and sin are multiplied by `magnitude`.
    """

    neox: bool  # pairs (i, i + n_rot / 2), else (2i, 2i + 1)
    inv_freq: NDArray[np.float64]  # [n_rot / 2], scaling included
    magnitude: float = 1.0
    first: int = 0  # the channel that the turning ones begin at

    @property
    def n_rot(self) -> int:
        """Channels that turn."""
        return 2 * len(self.inv_freq)

    def tables(self, positions: I64) -> tuple[F32, F32]:
        """cos and sin, f32 [len(positions), n_rot / 2]; the angles are reduced in float64."""
        angles = positions[:, None] * self.inv_freq
        return (
            (np.cos(angles) * self.magnitude).astype(np.float32),
            (np.sin(angles) * self.magnitude).astype(np.float32),
        )


@dataclass(frozen=True)
class LayerShape:
    """The cache's shape in one layer."""

    n_head: int  # query heads
    n_kv: int  # KV heads
    d_k: int  # channels of a key
    d_v: int  # channels of a value
    window: int = 0  # tokens that a query sees, itself included; 0: all
    shared: bool = False  # values are the first d_v channels of the keys: only these are kept

    @property
    def kept(self) -> int:
        """Values that a token costs in the cache, of each KV head."""
        return self.d_k if self.shared else self.d_k + self.d_v


@dataclass(frozen=True)
class CacheFormats:
    """Which formats the pages of one layer have; names of modules in `formats`."""

    page_k: str
    page_v: str
    tail_k: str
    tail_v: str
    transform_k: str = "none"  # of key pages: none, hadamard or random; see transforms.py
    transform_v: str = "none"
    position: str = "write"  # when RoPE turns the keys: as they are written, or as they are read

    @property
    def exact_k(self) -> bool:
        """Whether key pages are the tail's pages."""
        return self.page_k == self.tail_k and self.transform_k == "none"

    @property
    def exact_v(self) -> bool:
        """Whether value pages are the tail's pages."""
        return self.page_v == self.tail_v and self.transform_v == "none"

    @property
    def exact(self) -> bool:
        """Whether nothing is ever encoded."""
        return self.exact_k and self.exact_v


@dataclass
class Segment:
    """Consecutive tokens of one sequence between which no page is encoded."""

    first: int  # row of the batch
    count: int


@dataclass
class Round:
    """Segments of different sequences that may run together; their pages are encoded after it."""

    segments: list[Segment]
    rows: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    # per layer and side (keys, values): int64 [n, 2], address of a table entry and of a new page
    moves: list[tuple[I64, I64]] = field(default_factory=list)
    parts: list[list[tuple[I64, I64]]] = field(default_factory=list)  # moves, by sequence

    def join(self) -> None:
        """Rows and moves of all segments."""
        rows = [np.arange(s.first, s.first + s.count) for s in self.segments]
        self.rows = np.concatenate(rows).astype(np.int32)
        self.moves = [
            (np.concatenate([k for k, _ in layer]), np.concatenate([v for _, v in layer]))
            for layer in zip(*self.parts, strict=True)
        ]


@dataclass
class Part:
    """The rows of one sequence in a batch, and its tables int64 [2, layers, KV heads, capacity]."""

    first: int  # row of the batch
    count: int
    sequence: PageTables
    low: int  # entries low .. high - 1 may be others than after the sequence's last batch
    high: int


@dataclass
class Move:
    """Pages that are made of tokens of other pages, for one layer and side.

    kind: "tail" tail pages of tail pages, "seal" encoded pages of tail pages, "page" encoded pages
    of encoded pages. A pick is source * 64 + slot; -1: no token, and its values are zeros.
    """

    layer: int
    side: int  # 0 keys, 1 values
    kind: str
    pages: I64  # [n] addresses of the new pages
    heads: I64  # [n] KV head of each
    sources: I64  # [n, sources] addresses of the pages that are read; 0: none
    picks: I32  # [n, 64]


class Keeper(Protocol):
    """Takes a policy's decisions while a batch runs, a layer and a row at a time."""

    def before(self, layer: int, row: int) -> list[Move]:
        """Make room for the row's token, and fill in its record; the moves come first."""
        ...

    def after(self, layer: int, row: int) -> None:
        """Decide what stays; the row's attention lies where its record says."""
        ...


@dataclass
class Policy:
    """What a policy asks of a backend in a step.

    `places` and `sink_places` are positions by place in the cache: for queries whose keys are
    turned when they are read, and for queries on their way to the sinks.
    """

    layers: frozenset[int]  # layers whose heads keep what the policy says
    sums: bool = False  # whether each row's attention is wanted, summed over a KV head's queries
    keeper: Keeper | None = None  # None: all rows at once, decisions come after the step
    places: I64 | None = None  # [T]
    sink_places: I64 | None = None  # [T]
    queries: bool = False  # whether turned queries are wanted, see the records
    moves: list[Move] = field(default_factory=list)  # to be done before anything else

    @property
    def kind(self) -> tuple[frozenset[int], bool, bool, bool]:
        """What a program that is kept depends on."""
        return self.layers, self.sums, self.places is None, self.queries

    def copy(self) -> Policy:
        """The same with places of its own."""
        places, sink_places = (None if p is None else p.copy() for p in self._all_places)
        return Policy(self.layers, self.sums, None, places, sink_places, self.queries)

    def take_places(self, other: Policy) -> None:
        """Take over another step's places."""
        for mine, theirs in zip(self._all_places, other._all_places, strict=True):
            if mine is not None and theirs is not None:
                mine[:] = theirs

    @property
    def _all_places(self) -> tuple[I64 | None, I64 | None]:
        return self.places, self.sink_places


@dataclass
class Step:
    """One batch, as the backend sees it.

    `records` is int64 [layers, T, RECORD]: 0 key table, 1 value table (addresses), 2 table
    capacity, 3 sinks, 4 encoded pages, 5 place in the table, 6 lowest visible place, 7 position.
    A table is page addresses int64 [KV heads, capacity]: entry 0 the sinks page, entry 1 + i the
    places sinks + 64 i onwards; entries up to `encoded pages` have the page format, others the
    tail's. A token's place is its position, but under a policy: there 8 is the address of int64
    [KV heads, 2], place and encoded pages by head, and 9 that of uint64 [KV heads, capacity], the
    bit of each slot that holds a token. 10 is where a row's attention is to be written,
    f32 [KV heads, capacity, 64], and 11 where its queries are, f32 [query heads, D]; 0: nowhere.
    """

    shapes: Sequence[LayerShape]
    formats: Sequence[CacheFormats]
    tokens: I32  # [T]
    positions: I64  # [T]
    outputs: I32  # rows whose logits are wanted
    records: I64
    rounds: list[Round]
    # per layer what a calibration file holds, for keys and for values of each KV head; or nothing
    numbers: Sequence[Sequence[Sequence[HeadNumbers]]] = ()
    cancelled: Callable[[], bool] | None = None  # asked now and then; True stops the run
    parts: list[Part] = field(default_factory=list)
    n_ctx: int = 0  # tokens that fit a sequence
    memory: PageMemory | None = None  # where the pages lie
    policy: Policy | None = None

    def check_cancelled(self) -> None:
        """Raise CancelledError if the run is to stop."""
        if self.cancelled is not None and self.cancelled():
            raise CancelledError("the run was stopped")

    @property
    def n_rows(self) -> int:
        """T, the tokens of the batch."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Choice:
    """How a token is drawn from logits: SamplingConfig's names, engine/sampler.py's rules."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalised: I64  # [n] tokens that occurred
    counts: I64  # [n] how often
    suppressed: I64  # tokens that are never drawn
    uniform: float  # 0 <= uniform < 1


@dataclass(frozen=True)
class Chosen:
    """A drawn token, how many could have been drawn, and whether all logits were finite."""

    token: int
    n_candidates: int
    finite: bool
