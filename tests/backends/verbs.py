"""Ways to drive a backend: one verb, one attention, a small model."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
from page_oracle import SIDES, bytes_at, coded, decode, encode
from store_oracle import Oracle

from pykv.backends.base import CacheFormats, LayerShape, Rope, Round, Segment, Step
from pykv.cache.pages import HostMemory
from pykv.cache.store import Store

U = 2.0**-24  # float32's unit roundoff


@dataclass
class Source:
    """A tensor as a file would give it."""

    name: str
    shape: tuple
    type: str
    data: np.ndarray


def source(type_, values, name="w"):
    """A tensor of that type which holds about these values."""
    kind = gguf.GGMLQuantizationType[type_.upper()]
    data = gguf.quants.quantize(values.astype(np.float32), kind)
    return Source(name, values.shape, type_, np.ascontiguousarray(data).view(np.uint8))


def values_of(tensor):
    """What a tensor holds, f64, by the gguf package."""
    kind = gguf.GGMLQuantizationType[tensor.type.upper()]
    layout = {"f32": np.float32, "f16": np.float16}.get(tensor.type, np.uint8)
    values = gguf.quants.dequantize(tensor.data.view(layout), kind)
    return values.reshape(tensor.shape).astype(np.float64)


def plain_step(rows, tokens=None, outputs=None):
    """A step of a batch that has nothing to do with a cache."""
    formats = CacheFormats("f16", "f16", "f16", "f16")
    return Step(
        [LayerShape(1, 1, 32, 32)],
        [formats],
        np.zeros(rows, np.int32) if tokens is None else np.array(tokens, np.int32),
        np.arange(rows, dtype=np.int64),
        np.arange(rows, dtype=np.int32) if outputs is None else np.array(outputs, np.int32),
        np.zeros((1, rows, 16), np.int64),
        [Round([Segment(0, rows)], np.arange(rows, dtype=np.int32))],
    )


class Graph:
    """A model of one function."""

    def __init__(self, forward):
        self.forward = forward


def result(backend, verb, *arrays, step=None):
    """What `verb(backend, step, *arrays)` gives, f32."""
    step = step or plain_step(len(arrays[0]))

    def forward(step):
        return verb(backend, step, *(backend.array(x) for x in arrays))

    return backend.run(Graph(forward), step)


class BackendOracle(Oracle):
    """The store's oracle over any backend's attention."""

    def attention(self, step, layer, q, k, v):
        def verb(backend, step, *qkv):
            return backend.attention(step, layer, *qkv, self.rope, self.scale(layer))

        if self.backend.name == "cpu":
            self.backend._programs.clear()  # each is for another graph
        return result(self.backend, verb, q, k, v, step=step)

    def encoded(self, sequence, place, address):
        """As the reference's; but the rounding of a map may move a code to its neighbour."""
        layer, side, head, _ = place
        kept = self.layers[layer].sides[side]
        if kept.matrices is None or self.backend.name == "reference":
            return super().encoded(sequence, place, address)
        d = self.width_of(place)
        page = bytes_at(address, kept.page.page_bytes(d, SIDES[side])).copy()
        self._check_mapped(kept, side, head, self.tail_of(sequence, place), page)
        return self.page_of(page, place)

    def _check_mapped(self, kept, side, head, x, page):
        """A mapped page's values lie no farther from the exact ones than the codec's would."""
        m, numbers = kept.matrix(head).astype(np.float64), kept.keyword(head)
        y = x.astype(np.float64) @ m
        # Higham, section 3.1: d roundings in each of the float32 sums
        eps = (len(m) + 1) * U * (np.abs(x) @ np.abs(m)).max()
        got = decode(kept.page, side, page, m.shape[1], **numbers)
        best = encode(kept.page, side, y.astype(np.float32), **numbers)
        best = decode(kept.page, side, best, m.shape[1], **numbers)
        slack = 4 * eps + 2.0**-10 * np.abs(y)
        if coded(kept.page) and kept.page.n_parameters:
            # values of a group lie in one token, or in one channel; a scale and a minimum that are
            # eps apart may be rounded to neighbouring float16 numbers, which moves a value by that
            # part of the largest, once in the choice of its code and once in what it means
            axis = (kept.page.value_axis if side else kept.page.key_axis) == "channel"
            slack = slack + 4 * 2.0**-10 * np.abs(y).max(0 if axis else 1, keepdims=True)
        assert (np.abs(got - y) <= np.abs(best - y) + slack).all()


class Tiny:
    """Two layers, the second with a window; tokens in, logits out."""

    shapes = (LayerShape(4, 2, 32, 32), LayerShape(2, 1, 40, 48, window=70))
    vocabulary, width = 61, 64

    def __init__(self, backend, seed=0):
        rng = np.random.default_rng(seed)

        def matrix(n_out, n_in, type_="f16"):
            return backend.load(source(type_, rng.normal(0, n_in**-0.5, (n_out, n_in))))

        self.dev, self.trouble = backend, {}
        embedding = rng.normal(0, 1, (self.vocabulary, self.width))
        self.embedding = backend.load(source("q8_0", embedding))
        self.norm = backend.load_vector(source("f32", rng.normal(1, 0.2, self.width)))
        self.layers = []
        for s in self.shapes:
            sizes = (s.n_head * s.d_k, s.n_kv * s.d_k, s.n_kv * s.d_v)
            qkv = [matrix(n, self.width, "q8_0") for n in sizes]
            mlp = [matrix(96, self.width), matrix(96, self.width), matrix(self.width, 96)]
            rope = Rope(True, 10000.0 ** (-2 * np.arange(s.d_k // 2) / s.d_k))
            self.layers.append((qkv, matrix(self.width, s.n_head * s.d_v, "f32"), mlp, rope))

    def forward(self, step):
        dev = self.dev
        x = dev.embed(self.embedding, step)
        for i, (shape, (qkv, out, mlp, rope)) in enumerate(
            zip(self.shapes, self.layers, strict=True)
        ):
            a = dev.rms_norm(x, self.norm, 1e-5)
            q, k, v = (dev.linear(a, w) for w in qkv)
            q, k = q.reshape(-1, shape.n_head, shape.d_k), k.reshape(-1, shape.n_kv, shape.d_k)
            v = v.reshape(-1, shape.n_kv, shape.d_v)
            o = dev.attention(step, i, q, k, v, rope, shape.d_k**-0.5)
            x = dev.linear(o, out, x)
            gate, up, down = mlp
            a = dev.rms_norm(x, self.norm, 1e-5)
            x = dev.linear(dev.swiglu(dev.linear(a, gate), dev.linear(a, up)), down, x)
        return dev.linear(dev.take_rows(x, step), self.embedding)


class Run:
    """A tiny model with a store."""

    def __init__(self, backend, config, seed=0):
        self.backend, self.graph = backend, Tiny(backend, seed)
        self.store = Store(
            Tiny.shapes, config, 4000, memory=backend.page_memory() or HostMemory(255)
        )
        backend.prepare(Tiny.shapes, self.store.formats)
        self.sequence = self.store.new_sequence()

    def step(self, parts):
        """Logits of every row, f32 [T, vocabulary]; parts are (sequence, tokens)."""
        batch = [(s, np.asarray(t, np.int32)) for s, t in parts]
        rows = sum(len(t) for _, t in batch)
        step = self.store.begin(batch, np.arange(rows, dtype=np.int32))
        try:
            logits = self.backend.run(self.graph, step)
        except BaseException:
            self.store.abort()
            raise
        self.store.commit()
        return logits

    def read(self, tokens, size=None):
        """The one sequence goes on, `size` tokens at a time."""
        size = size or len(tokens)
        parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        return np.concatenate([self.step([(self.sequence, p)]) for p in parts])
