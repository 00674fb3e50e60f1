"""The store: every sequence's keys and values, in pages of 64 tokens of one KV head.

A head's cache is the sinks (the first S tokens) in a short page, encoded pages, and the tail, whose
newest page may be partly filled. New tokens go to the tail; while it holds residual + 64 tokens or
more, its oldest 64 are encoded. Sequences that keep every token have tables of consecutive tokens,
see paging.py; what a policy has kept, head by head, is in kept.py.

A batch is one transaction: `begin` allocates whatever it will need and tells the backend where
things lie, `commit` makes it count, `abort` leaves the store as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pykv.backends.base import F32, I32, RECORD, LayerShape, Move, PageMemory, Step
from pykv.cache import deciding
from pykv.cache.deciding import Ending, Rows
from pykv.cache.kept import Kept
from pykv.cache.layout import bands_of, policy_of, sinks_of
from pykv.cache.pages import SLAB_BYTES, Held, HostMemory, Recent, Undo
from pykv.cache.paging import Paging
from pykv.config import CacheConfig
from pykv.errors import CacheFullError, ConfigError
from pykv.formats.coded import HeadNumbers
from pykv.policies.base import U8


class Store:
    """Keys and values of all sequences of a model.

    `n_ctx` tokens fit a sequence. `memory` is where pages lie, the process's own by default;
    `numbers` is what a calibration file says of each layer, for the formats that want one.
    `classes` u8 [vocabulary] are the tokens' classes, for policies that ask.
    """

    classes: U8 = np.zeros(0, np.uint8)

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        config: CacheConfig,
        n_ctx: int,
        memory: PageMemory | None = None,
        numbers: Sequence[Sequence[Sequence[HeadNumbers]]] = (),
    ) -> None:
        self.shapes, self.n_ctx = list(shapes), n_ctx
        self.sinks = sinks_of(config)
        self.config = replace(config, sinks=self.sinks)
        bands = bands_of(self.config, self.shapes)
        self.memory: PageMemory = HostMemory() if memory is None else memory
        self._paging = Paging(self.shapes, bands, self.sinks, n_ctx, self.memory)
        self.formats = [bands[n].formats for n in self._paging.band_of]
        self.numbers = numbers
        self.policy, budget = policy_of(self.config)
        self._rules = None
        if self.policy is not None:
            self._rules = deciding.rules(self.policy, budget, self._paging)
        self._sequences: dict[int, Held] = {}
        self._next = 0
        self._open: list[Undo] = []
        self._rows: Rows | None = None  # of an open batch that is decided row by row
        self._fresh: list[Held] = []  # sequences that a policy takes over in the open transaction
        self.peak_nbytes = (
            0  # most that was in use after a batch, where a policy reads whole prompts
        )

    # sequences

    def new_sequence(self) -> int:
        """An empty sequence's number."""
        held = self._paging.empty()
        self._start(held)
        return self._add(held)

    def _start(self, held: Held) -> None:
        """What a policy wants to know of a sequence from its beginning."""
        held.kept = held.recent = None
        if self._rules is not None:
            if self._rules.policy.moment == "token":
                held.kept = Kept(self._rules)
            else:
                n = self._rules.policy.n_queries
                held.recent = Recent(
                    [np.zeros((n, s.n_head, s.d_k), np.float32) for s in self._rules.shapes]
                )

    def _add(self, sequence: Held) -> int:
        self._next += 1
        self._sequences[self._next] = sequence
        return self._next

    def length(self, sequence: int) -> int:
        """Tokens that a sequence has read."""
        return self._sequences[sequence].tokens

    def room(self, sequence: int) -> int:
        """Tokens that may yet be read."""
        return self.limit - self.length(sequence)

    @property
    def limit(self) -> int:
        """Tokens that a sequence may have: more than n_ctx where no more than these are kept."""
        return self.n_ctx if self._rules is None else deciding.limit(self._rules, self.n_ctx)

    @property
    def forks(self) -> bool:
        """Whether sequences can share pages."""
        return self.policy is None or not self.policy.per_head

    def fork(self, sequence: int) -> int:
        """A new sequence that shares every page with this one.

        Raises ConfigError: heads keep different tokens.
        """
        if not self.forks:
            raise ConfigError(
                f"a sequence cannot be forked, nor a prefix shared, under --kv-policy "
                f"{self.config.policy}: each head keeps tokens of its own; read the text again"
            )
        old = self._sequences[sequence]
        for pool, addresses in self._paging.pages_of(old):
            pool.hold(addresses)
        kept = None if old.kept is None else old.kept.fork()
        return self._add(
            Held(old.tables.copy(), old.tokens, list(old.encoded), list(old.first), kept)
        )

    def free(self, sequence: int) -> None:
        """Give back a sequence's pages."""
        self._drop_pages(self._sequences.pop(sequence))

    def _drop_pages(self, held: Held) -> None:
        kept = [] if held.kept is None else held.kept.pages()
        for pool, addresses in [*self._paging.pages_of(held), *kept]:
            pool.drop(addresses)

    def truncate(self, sequence: int, n: int) -> int:
        """Keep the largest m <= n tokens that leave exactly the state that reading m would have.

        Returns m; the caller reads tokens m to n again. Once a policy has acted it is 0.
        """
        held, paging = self._sequences[sequence], self._paging
        n = min(n, held.tokens)
        if held.kept is not None and n < held.tokens:
            self._drop_pages(held)
            fresh = paging.empty()
            held.tables, held.tokens, held.encoded = fresh.tables, 0, fresh.encoded
            held.first = fresh.first
            self._start(held)
            return 0
        m = paging.cut_point(held, n)
        keep = paging.entries(m) if m > 0 else 0
        encoded = [min(n_pages, max(keep - 1, 0)) for n_pages in held.encoded]
        for pool, addresses in paging.pages_of(held, keep):
            pool.drop(addresses)
        held.tables[:, :, :, keep:] = 0
        if held.recent is not None and m < held.tokens:
            held.recent.first = m
            del held.recent.tokens[m:]
        held.tokens, held.encoded = m, encoded
        if m == 0:
            held.first = [0] * len(self.shapes)
        return m

    # a batch

    def begin(self, batch: Sequence[tuple[int, I32]], outputs: I32) -> Step:
        """Make room for the tokens of some sequences; returns what the backend must know.

        Raises CacheFullError: a sequence would pass `limit` tokens; ConfigError: one has no tokens,
        or is there twice. Nothing is changed then.
        """
        self._check_batch(batch)
        for sequence, tokens in batch:
            if len(tokens) > self.room(sequence):
                raise CacheFullError(
                    f"the context is full: {self.length(sequence)} tokens are cached, "
                    f"{len(tokens)} more were to be added, and {self.limit} fit; raise --ctx-size "
                    "or start anew"
                )
        total = sum(len(tokens) for _, tokens in batch)
        step = Step(
            self.shapes,
            self.formats,
            np.concatenate([tokens for _, tokens in batch]).astype(np.int32),
            np.empty(total, np.int64),
            outputs,
            np.zeros((len(self.shapes), total, RECORD), np.int64),
            [],
            self.numbers,
            n_ctx=self.n_ctx,
            memory=self.memory,
        )
        try:
            row = 0
            for sequence, tokens in batch:
                held = self._sequences[sequence]
                undo = self._paging.make_room(sequence, held, len(tokens), self._open.append)
                self._paging.describe(held, undo, len(tokens), row, step)
                row += len(tokens)
            if self._rules is not None:
                self._rows = Rows(self._rules, step, self._open, self._sequences)
                self._rows.start()
        except BaseException:
            self.abort()
            raise
        for round_ in step.rounds:
            round_.join()
        return step

    def _check_batch(self, batch: Sequence[tuple[int, I32]]) -> None:
        # what one part undoes must not be what another did
        if len({sequence for sequence, _ in batch}) < len(batch):
            raise ConfigError("a sequence is in the batch twice; put its tokens together")
        if not batch or not all(len(tokens) for _, tokens in batch):
            raise ConfigError("a batch needs sequences, and each of them a token at least")

    def commit(self) -> None:
        """Make the batch count: pages that it replaced, or that no query sees any more, go."""
        # first: an interrupt from here on may lose a page, but not give one back twice
        done, self._open = self._open, []
        rows, self._rows = self._rows, None
        fresh, self._fresh = self._fresh, []
        if rows is not None:
            rows.finish()
        for undo in done:
            for pool, addresses in undo.replaced:
                pool.drop(addresses)
            held = self._sequences[undo.sequence]
            if held.kept is not None:
                held.kept.tokens = held.tokens
                held.kept.commit()
            self._paging.leave_window(held)
        for held in fresh:  # its pages are the policy's now
            held.tables[:, self._paging.policy_layers] = 0
        if self.policy is not None:
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def abort(self) -> None:
        """Leave every sequence of the batch as it was before."""
        for undo in reversed(self._open):
            held = self._sequences[undo.sequence]
            if held.kept is not None:
                held.kept.abort()
            held.tables[:, :, :, undo.low : undo.high] = undo.before
            held.tokens, held.encoded = undo.tokens, undo.encoded
            if held.recent is not None:
                held.recent.abort(undo.tokens)
            for pool, addresses in undo.taken:
                pool.drop(addresses)
        for held in self._fresh:
            held.kept = None
        self._open, self._rows, self._fresh = [], None, []

    # the end of a prompt

    def begin_prompt(self, sequence: int) -> None:
        """What is read from here on is a prompt, until `end_prompt`."""
        kept = self._sequences[sequence].kept
        if kept is not None and self.policy is not None:
            kept.reading = self.policy.whole_prompts

    def end_prompt(self, sequence: int) -> Ending | None:
        """A prompt was read to its end: what a policy wants to know then; None: nothing.

        With an ending, `select` and then `commit` or `abort` follow.
        """
        held = self._sequences[sequence]
        if self._rules is None or not self._rules.policy.whole_prompts:
            return None
        if held.tokens == 0:  # then what follows is no prompt
            if held.kept is not None:
                held.kept.reading = False
            return None
        return deciding.ending(self._rules, held, self._paging, self.numbers)

    def select(self, sequence: int, ending: Ending, sums: dict[int, F32]) -> list[Move]:
        """Take the policy's decision, given each layer's attention; returns what is to be moved."""
        held = self._sequences[sequence]
        if self._rules is None:
            return []
        n = held.tokens
        self._open = [Undo(sequence, 0, 0, held.tables[:, :, :, :0], [], [], n, list(held.encoded))]
        if held.kept is None:
            held.kept = deciding.taken_over(self._rules, held, self._paging)
            self._fresh.append(held)
        held.kept.begin(large=True)
        if held.recent is not None:
            held.recent.begin([])
        return deciding.select(held.kept, held.recent, ending, sums, self.classes)

    def positions(self, sequence: int, layer: int, head: int) -> list[int]:
        """Positions of the tokens that a head of a layer still has, in order."""
        held, n = self._sequences[sequence], self.length(sequence)
        if held.kept is None or not self._paging.bands[self._paging.band_of[layer]].policy:
            lowest = max(n - self.shapes[layer].window, 0) if self.shapes[layer].window else 0
            return list(range(lowest, n))
        kept = held.kept
        own = kept.positions[kept.rules.layers.index(layer), head]
        return [*range(min(self.sinks, n)), *sorted(own[own >= 0].tolist())]

    # bytes

    @property
    def _tables_nbytes(self) -> int:
        held = self._sequences.values()
        own = sum(h.tables.nbytes for h in held) + sum(h.kept.nbytes for h in held if h.kept)
        return own + sum(h.recent.nbytes for h in held if h.recent)

    @property
    def nbytes(self) -> int:
        """Bytes in use for cached tokens, tables and partly filled pages included."""
        pages = sum(p.in_use * p.page_bytes for p in self._paging.pools.values())
        return pages + self._tables_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of the slabs, and of the tables."""
        return self.memory.reserved_bytes + self._tables_nbytes

    @property
    def f16_nbytes(self) -> int:
        """What all tokens would take as bare f16 values, windows respected."""
        total = 0
        for held in self._sequences.values():
            for shape in self.shapes:
                kept = min(held.tokens, shape.window or held.tokens)
                total += kept * shape.n_kv * shape.kept * 2
        return total

    def estimate(self, n: int) -> int:
        """Bytes that one sequence of n tokens takes, and its slabs' last pages."""
        kept = n if self._rules is None else deciding.most_kept(self._rules, n)
        return sum(
            band.estimate(self.shapes[layer], kept if band.policy else n)
            for band in self._paging.bands
            for layer in band.layers
        ) + SLAB_BYTES * sum(len(band.sizes) for band in self._paging.bands)
