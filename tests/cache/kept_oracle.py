"""What a policy keeps, worked out with plain lists, beside a store that is driven over a backend.

A head's list holds its tokens in order. Nothing is taken from the store's arithmetic: budgets,
decisions and what is encoded by when are worked out from the sentences of the design. Only where
scales go over several tokens (kivi keys) is what pages hold read from the store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from page_oracle import ROPE, Formats, decode, encode, layers_of, turned

from pykv.backends import reference
from pykv.backends.base import PAGE, LayerShape, Step
from pykv.backends.reference_pages import read_page
from pykv.cache.pages import HostMemory
from pykv.cache.store import Store

SHAPES = (
    LayerShape(4, 2, 4, 3),
    LayerShape(2, 2, 4, 3, window=75),
    LayerShape(4, 2, 32, 5),
)


@dataclass
class Text:
    """Queries, keys and values of a text, per layer f32 [tokens, heads, D]."""

    q: list
    k: list
    v: list

    def __len__(self):
        return len(self.q[0])

    def part(self, first, last):
        return Text(*([x[first:last] for x in side] for side in (self.q, self.k, self.v)))


def text_of(n, shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)

    def draw(heads, d, size):
        return rng.normal(0, size, (n, heads, d)).astype(np.float32)

    return Text(
        # heads that look about evenly, and others at little
        [draw(s.n_head, s.d_k, np.linspace(0.7, 3, s.n_head)[:, None]) for s in shapes],
        [draw(s.n_kv, s.d_k, 1) for s in shapes],
        [draw(s.n_kv, s.d_v, 1) for s in shapes],
    )


class Weight:
    """A float32 tensor as a file would give it."""

    name, type = "w", "f32"

    def __init__(self, values):
        self.shape, self.data = values.shape, values.view(np.uint8)


class Attention:
    """A graph of nothing but attention; each layer's output stands in columns of its own."""

    def __init__(self, backend, shapes, rope):
        self.dev, self.shapes, self.rope, self.text = backend, shapes, rope, None
        widths = [s.n_head * s.d_v for s in shapes]
        total = (sum(widths) + 31) // 32 * 32
        self.columns = np.cumsum([0, *widths])
        eye, self.places = np.eye(total, dtype=np.float32), []
        for first, last in zip(self.columns, self.columns[1:], strict=False):
            self.places.append(backend.load(Weight(eye[:, first:last].copy())))

    def forward(self, step):
        dev, total = self.dev, None
        for i, shape in enumerate(self.shapes):
            q, k, v = (dev.array(x[i]) for x in (self.text.q, self.text.k, self.text.v))
            out = dev.attention(step, i, q, k, v, self.rope, shape.d_k**-0.5)
            total = dev.linear(out, self.places[i], total)
        return total


@dataclass
class Token:
    """One token in a head's list."""

    position: int
    score: float = 0.0
    sealed: bool = False


class Lists:
    """A policy over plain lists of tokens: [layer of the policy][head], sinks not among them."""

    def __init__(self, run, text, sequence=None):
        self.run, self.text, self.sequence = run, text, sequence
        self.policy, self.sinks, self.n = run.store.policy, run.config.sinks, 0
        if not self.policy.keeps_sinks:
            self.sinks = 0
        self.heads = {(i, g): [] for i in run.layers for g in range(run.shapes[i].n_kv)}
        self.reading = self.policy.whole_prompts
        self.known, self.pages_read = {}, {}

    def budget(self):
        text = str(self.run.config.budget)
        if text.endswith("%"):
            return max(64, int(self.n * float(text[:-1]) / 100))
        return int(text)

    def limit(self, layer):
        """Tokens of the tail at which its oldest 64 are encoded."""
        how = self.run.how[layer]
        if how.exact:
            return 1 << 60
        residual = how.residual
        if self.policy.moment == "token":
            least = 64 if "%" in str(self.run.config.budget) else int(self.run.config.budget)
            residual = min(residual, max(self.policy.recent_tokens(least, self.sinks) - PAGE, 0))
        return residual + PAGE

    def content(self, layer, side, head, token):
        """A token's key or value as the cache holds it by now, f64 [D]."""
        kept = self.run.how[layer].sides[side]
        place = layer, side, head, token.sealed
        if place not in self.known:
            self.known[place] = self._contents(*place)
        known = self.known[place][token.position]
        by_channel = side == 0 and getattr(kept.page, "key_axis", "") == "channel"
        if not token.sealed or not (by_channel or kept.matrices is not None):
            return known
        if (layer, head) not in self.pages_read:
            self.pages_read[layer, head] = self.run.stored(self.sequence, layer, head)
        stored = self.pages_read[layer, head][token.position][side]
        # a rounding of the map may move a code to its neighbour
        if not by_channel:
            assert np.linalg.norm(stored - known) <= 0.2 * np.linalg.norm(known)
        return stored

    def _contents(self, layer, side, head, sealed):
        """Of all tokens, were each of them encoded, or none."""
        kept = self.run.how[layer].sides[side]
        x = (self.text.v if side else self.text.k)[layer][:, head].astype(np.float64)
        if side == 0 and self.run.rope is not None and not self.run.at_read:
            x = turned(x, self.run.rope, np.arange(len(x)))
        filled = np.zeros((-(-len(x) // PAGE) * PAGE, x.shape[1]), np.float32)
        filled[: len(x)] = x
        pages = [
            decode(kept.tail, side, encode(kept.tail, side, page), x.shape[1])
            for page in np.split(filled, len(filled) // PAGE)
        ]
        if sealed and not kept.exact:
            matrix, key = kept.matrix(head), kept.keyword(head)
            pages = [p if matrix is None else p @ matrix for p in pages]
            pages = [
                decode(kept.page, side, encode(kept.page, side, p, **key), p.shape[1], **key)
                for p in pages
            ]
            pages = [p if matrix is None else p @ matrix.T for p in pages]
        return np.concatenate(pages).astype(np.float64)

    # a token

    def begin(self):
        """The next token joins; full tails are encoded before."""
        self.pages_read = {}
        for (layer, _), tokens in self.heads.items():
            tail = [t for t in tokens if not t.sealed]
            if len(tail) >= self.limit(layer):
                block = tail[:PAGE]
                if not self.policy.per_head:  # pages stay as they were filled
                    end = tail[0].position - (tail[0].position - self.sinks) % PAGE + PAGE
                    block = [t for t in tail if t.position < end]
                for token in block:
                    token.sealed = True
            if self.n >= self.sinks:
                tokens.append(Token(self.n))
        self.n += 1

    def attend(self):
        """What the newest token's queries see: per policy layer f64 [H, D], and sums by head."""
        outs, self.sums = {}, {}
        now = self.n - 1
        for layer in self.run.layers:
            shape = self.run.shapes[layer]
            group = shape.n_head // shape.n_kv
            outs[layer] = np.empty((shape.n_head, shape.d_v))
            for g in range(shape.n_kv):
                p, values = self.shares(layer, g, now, self.text.q[layer][now])
                outs[layer][g * group : (g + 1) * group] = p @ values
                self.sums[layer, g] = p.sum(0)[min(self.n, self.sinks) :]
        return outs

    def shares(self, layer, head, now, q):
        """Attention [group, tokens] of a query at `now` to sinks and tokens, and their values."""
        shape, rope = self.run.shapes[layer], self.run.rope
        group = shape.n_head // shape.n_kv
        sinks = [Token(j) for j in range(min(self.sinks, now + 1))]
        tokens = [*sinks, *(t for t in self.heads[layer, head] if t.position <= now)]
        keys, values = (
            np.array([self.content(layer, side, head, t) for t in tokens]) for side in (0, 1)
        )
        q = q[head * group : (head + 1) * group].astype(np.float64)
        own = far = q
        if rope is not None:
            positions = np.array([t.position for t in tokens])
            if self.run.at_read:
                keys = turned(keys, rope, positions)
            place = len(tokens) - 1 if self.policy.endless else now
            own, far = (turned(q[None], rope, np.array([at]))[0] for at in (now, place))
        n = len(sinks)
        scores = np.concatenate([far @ keys[:n].T, own @ keys[n:].T], axis=1) * shape.d_k**-0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True), values

    def decide(self):
        """Note the attention, and drop what the policy's description says."""
        kept = min(self.n, self.sinks) + len(next(iter(self.heads.values())))
        over = 0 if self.reading else kept - self.budget()
        for place, tokens in self.heads.items():
            for token, paid in zip(tokens, self.sums[place], strict=True):
                self.note(place, token, paid, kept)
        if over > 0:
            self.drop(over, kept)

    def note(self, place, token, paid, kept):
        if self.policy.name == "h2o":
            token.score += paid
        elif self.policy.name == "scissorhands":
            group = self.run.shapes[place[0]].n_head // self.run.shapes[place[0]].n_kv
            token.score *= 1 - 1 / self.policy.history
            token.score += paid / group < 1 / kept

    def drop(self, over, kept):
        name, budget, now = self.policy.name, self.budget(), self.n - 1
        count = max(over, int(0.1 * budget)) if name == "scissorhands" else over
        recent = {"h2o": max(1, (kept - count) // 2), "scissorhands": 10}.get(name, 1)
        for place, tokens in self.heads.items():
            old = [t for t in tokens if t.position <= now - recent]
            key = {
                "h2o": lambda t: (t.score, t.position),
                "scissorhands": lambda t: (-t.score, t.position),
            }.get(name, lambda t: t.position)
            gone = {id(t) for t in sorted(old, key=key)[:count]}
            self.heads[place] = [t for t in tokens if id(t) not in gone]

    def positions(self, layer, head):
        sinks = range(min(self.sinks, self.n))
        return [*sinks, *(t.position for t in self.heads[layer, head])]


class Run:
    """A store under a policy over a backend; texts are read in batches."""

    def __init__(
        self, policy, budget=None, formats=("f16", "f16"), sinks=4, residual=0, shapes=SHAPES,
        n_ctx=4000, backend=None, rope=None,
    ):  # fmt: skip
        formats = Formats(*formats)
        config = formats.config(sinks, residual)
        if policy != "full":
            config = replace(config, policy=policy, budget=budget)
        self.config, self.shapes, self.rope = config, shapes, rope
        self.backend = backend or reference.create()
        self.store = Store(shapes, config, n_ctx, HostMemory(255))
        self.at_read = self.store.formats[0].position == "read"
        self.rope = ROPE if self.at_read else rope
        self.how = layers_of(config, shapes)
        self.layers = [i for i, s in enumerate(shapes) if not s.window]
        self.graph = Attention(self.backend, shapes, self.rope)
        self.backend.prepare(shapes, self.store.formats)

    def begin(self, parts):
        """The store's step for [(sequence, text)]."""
        batch = [(s, np.zeros(len(text), np.int32)) for s, text in parts]
        self.graph.text = Text(*(
            [np.concatenate(x) for x in zip(*(getattr(t, side) for _, t in parts), strict=True)]
            for side in "qkv"
        ))  # fmt: skip
        total = sum(len(text) for _, text in parts)
        return self.store.begin(batch, np.arange(total, dtype=np.int32))

    def attend(self, step):
        """Outputs of every layer f32 [T, H, D]."""
        if self.backend.name == "cpu":
            self.backend._programs.clear()  # a graph's arrays are new each time
        out = self.backend.run(self.graph, step)
        spans = zip(self.graph.columns, self.graph.columns[1:], strict=False)
        return [
            out[:, first:last].reshape(len(out), s.n_head, s.d_v)
            for (first, last), s in zip(spans, self.shapes, strict=True)
        ]

    def write(self, parts):
        step = self.begin(parts)
        try:
            outs = self.attend(step)
        except BaseException:
            self.store.abort()
            raise
        self.store.commit()
        return outs

    def read(self, sequence, text, size=None):
        """A text, `size` tokens at a time; outputs of all its rows."""
        size, outs = size or len(text), []
        for first in range(0, len(text), size):
            outs.append(self.write([(sequence, text.part(first, first + size))]))
        return [np.concatenate(layer) for layer in zip(*outs, strict=True)]

    def end_prompt(self, sequence):
        """As the engine does it; returns the ending and its sums."""
        ending = self.store.end_prompt(sequence)
        if ending is None:
            return None, {}
        sums = {
            layer: self.backend.window_sums(ending.step, layer, q)
            for layer, q in ending.queries.items()
        }
        moves = self.store.select(sequence, ending, sums)
        try:
            self.backend.move(ending.step, moves)
        except BaseException:
            self.store.abort()
            raise
        self.store.commit()
        return ending, sums

    # what there is

    def kept(self, sequence):
        return self.store._sequences[sequence].kept

    def step_of(self, sequence):
        """A step whose records describe a sequence that a policy has taken over."""
        kept, n = self.kept(sequence), len(self.shapes)
        records = np.zeros((n, 1, 16), np.int64)
        for i, layer in enumerate(self.layers):
            records[layer, 0, :4] = (
                kept.tables[0, i].ctypes.data, kept.tables[1, i].ctypes.data, kept.capacity,
                self.store.sinks,
            )  # fmt: skip
            records[layer, 0, 8] = kept.words[i].ctypes.data
        return Step(
            self.shapes, self.store.formats, np.zeros(1, np.int32), np.zeros(1, np.int64),
            np.zeros(1, np.int32), records, [],
        )  # fmt: skip

    def stored(self, sequence, layer, head):
        """{position: (key, value)} of a head's live cells as they lie, f64."""
        kept, step, pages = self.kept(sequence), self.step_of(sequence), {}
        positions = kept.positions[self.layers.index(layer), head]
        found = {}
        for cell in np.flatnonzero(positions >= 0).tolist():
            entry = 1 + cell // PAGE
            if entry not in pages:
                pages[entry] = [
                    read_page(step, layer, 0, side, head, entry).astype(np.float64)
                    for side in (0, 1)
                ]
            found[int(positions[cell])] = tuple(x[cell % PAGE] for x in pages[entry])
        return found

    def state(self, sequence):
        """Positions, scores, bits, words, and what live cells hold, by layer and head."""
        kept, n = self.kept(sequence), {}
        for i, layer in enumerate(self.layers):
            for g in range(self.shapes[layer].n_kv):
                used = int(kept.cells[i, g])
                n[layer, g] = (
                    kept.positions[i, g, :used].tolist(),
                    kept.alive[i, g, : 2 + used // PAGE].tolist(),
                    kept.words[i, g].tolist(),
                    [x.tobytes() for kv in self.stored(sequence, layer, g).values() for x in kv],
                )
        return n

    def scores(self, sequence):
        """Of live cells, others 0."""
        kept = self.kept(sequence)
        used = int(kept.cells.max())
        return np.where(kept.positions[..., :used] >= 0, kept.scores[..., :used], 0)

    def in_use(self):
        return sum(pool.in_use for pool in self.store._paging.pools.values())


def compare(outs, expected, row, bound=1e-5):
    """One row of a run's outputs against the lists'."""
    for layer, out in expected.items():
        error = np.linalg.norm(outs[layer][row] - out, axis=-1)
        assert (error <= bound * np.linalg.norm(out, axis=-1)).all()
