"""Attention over keys whose first channels are the values: the CPU, the reference, and float64."""

from __future__ import annotations

import numpy as np
import pytest
from verbs import result

from pykv.backends import reference, transforms
from pykv.backends.base import PAGE, LayerShape, Rope
from pykv.cache.pages import HostMemory
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.errors import NumericsError
from pykv.formats.coded import HeadNumbers, find

SHAPE = LayerShape(6, 1, 128, 96, shared=True)  # three Hadamard blocks of 32
NARROW = LayerShape(33, 1, 45, 33, shared=True)
SCALE = 0.13
# formats, transforms and scales of a calibration file, of the latent and of the rest
FEW = [("f16", "none", None), ("q4_0", "hadamard", None), ("int8", "none", None)]
# the rest takes long to compile
MORE = [
    ("q8_0", "none", None),
    ("q8_0", "random", None),
    ("q4_0", "none", None),
    ("kivi4", "none", None),
    ("kivi2", "hadamard", None),
    ("tq4", "random", None),
    ("tq3", "random", None),
    ("fp8_e4m3", "none", None),
    ("fp8_e4m3", "none", (0.02, 3.0)),
    ("q5_1", "lowrank:40", None),
]
CASES = [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)]


class Text:
    """Tokens' queries and keys, and the store that they go into."""

    def __init__(self, backend, shape, config, scales=None, seed=0):
        self.backend, self.shape, self.config = backend, shape, config
        rng = np.random.default_rng(seed)
        self.rng, self.keys, self.queries = rng, np.empty((0, shape.d_k), np.float32), []
        basis = np.linalg.qr(rng.normal(size=(shape.d_v, shape.d_v)))[0].astype(np.float32)
        of_parts = [HeadNumbers(s and np.float32(s)) for s in scales or (None, None)]
        of_parts[0] = HeadNumbers(of_parts[0].scale, basis=basis)
        self.parts = of_parts
        # what a file says of values is what it says of the latent
        numbers = [[[of_parts[1]], [of_parts[0]]]]
        self.store = Store([shape], config, 4000, HostMemory(255), numbers)
        self.formats = self.store.formats[0]
        backend.prepare([shape], self.store.formats)
        self.sequence = self.store.new_sequence()

    def draw(self, n):
        """Keys whose turning channels are much larger than the latent's."""
        k = self.rng.normal(0, 1, (n, self.shape.d_k)).astype(np.float32)
        k[:, self.shape.d_v :] *= 20
        q = self.rng.normal(0, 1, (n, self.shape.n_head, self.shape.d_k)).astype(np.float32)
        q[..., self.shape.d_v :] /= 20
        return q, k

    def write(self, n, backend=None, sequence=None, given=None, rope=None):
        """Outputs [n, H, d_v] of n more tokens."""
        q, k = given or self.draw(n)
        step = self.store.begin(
            [(sequence or self.sequence, np.zeros(n, np.int32))], np.zeros(1, np.int32)
        )

        def verb(dev, step, q, k):
            return dev.attention(step, 0, q, k, None, rope, SCALE)

        dev = backend or self.backend
        if dev.name == "cpu":
            dev._programs.clear()
        out = result(dev, verb, q, k[:, None], step=step)
        self.store.commit()
        if sequence is None:
            self.keys = np.concatenate([self.keys, k])
            self.queries += list(q)
        return out.reshape(n, self.shape.n_head, self.shape.d_v)

    def seen(self, position):
        """Keys f64 [position + 1, d_k] as that query sees them; each part is encoded by itself."""
        x = self.keys[: position + 1]
        y = x.astype(np.float16).astype(np.float32)
        residual = self.store._paging.bands[0].residual
        for start in range(self.config.sinks, len(x), PAGE):
            if not self.formats.exact and position - (start + PAGE - 1) > residual:
                y[start : start + PAGE] = self.through(y[start : start + PAGE])
        return y.astype(np.float64)

    def through(self, x):
        format_, cut = find(self.formats.page_k), self.shape.d_v
        map_ = transforms.matrices(self.formats.transform_k, cut, [self.parts[0]])
        out = []
        for part, m, numbers in zip(
            (x[:, :cut], x[:, cut:]), (map_, None), self.parts, strict=True
        ):
            mapped = np.ascontiguousarray(part if m is None else part @ m[0])
            given = {"numbers": numbers} if format_.calibration != "none" else {}
            page = format_.encode_keys(mapped, **given)
            back = format_.decode_keys(page, mapped.shape[1], PAGE, **given)
            out.append(back if m is None else back @ m[0].T)
        return np.concatenate(out, 1)

    def expected(self, position):
        k, q = self.seen(position), self.queries[position].astype(np.float64)
        scores = q @ k.T * SCALE
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True) @ k[:, : self.shape.d_v]


def off(got, expected):
    """Errors of outputs [..., d_v] over their lengths."""
    error = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return error.max()


def config_of(type_, transform="none", sinks=4, residual=10):
    return CacheConfig(type_, type_, sinks, residual, transform_k=transform)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("type_", "transform", "scales"), CASES)
def test_formats_and_transforms(type_, transform, scales, backend, make_cpu):
    dev = make_cpu() if backend == "cpu" else reference.create()
    text = Text(dev, SHAPE, config_of(type_, transform), scales)
    outs = np.concatenate([text.write(n) for n in (150, 1, 3, 70, 1)])
    # a map's rounding may move a code to its neighbour, as cpu_attention's tests say
    bound = 2e-5 if transform == "none" or backend == "reference" else 3e-2
    for position in (0, 5, 60, 80, 149, 150, 153, 200, len(outs) - 1):
        assert off(outs[position], text.expected(position)) < bound, position
    if backend == "cpu":
        # the same pages, read by the other backend
        given = text.draw(9)
        other = text.write(9, reference.create(), text.store.fork(text.sequence), given)
        assert off(text.write(9, given=given), other) < 1e-5


@pytest.mark.parametrize("sinks", [0, 20])
def test_widths_that_no_block_divides(sinks, make_cpu):
    text = Text(make_cpu(), NARROW, config_of("f16", sinks=sinks))
    outs = np.concatenate([text.write(n) for n in (1, 2, 30, 1, 100, 1)])
    for position in (0, 1, 3, 25, 40, 100, len(outs) - 1):
        assert off(outs[position], text.expected(position)) < 2e-5


@pytest.mark.parametrize("type_", ["f16", "int8"])
def test_long_contexts_and_splits(type_, make_cpu):
    """Several chunks; rows are the same bits however they are batched, whatever the threads."""
    rows = {}
    for threads, sizes in ((2, [1300, 1, 7, 92]), (1, [1200, 100, 1, 30, 5, 64])):
        text = Text(make_cpu(threads, deterministic=True), SHAPE, config_of(type_, residual=0))
        q, k = text.draw(1400)
        outs, at = [], 0
        for n in sizes:
            outs.append(text.write(n, given=(q[at : at + n], k[at : at + n])))
            at += n
        rows[threads] = np.concatenate(outs)
        assert off(rows[threads][-1], text.expected(1399)) < 2e-5
    np.testing.assert_array_equal(rows[1], rows[2])
    text = Text(make_cpu(), SHAPE, config_of(type_, residual=0))
    assert off(text.write(1400, given=(q, k)), rows[1]) < 1e-5


def test_only_the_last_channels_turn(make_cpu):
    rope = Rope(False, 100.0 ** -(np.arange(16) / 16), 1.1, first=96)
    outs = []
    for dev in (make_cpu(), reference.create()):
        text = Text(dev, SHAPE, config_of("f16"))
        outs.append(np.concatenate([text.write(n, rope=rope) for n in (20, 1)]))
        position, q, k = 20, np.stack(text.queries), text.keys
    assert off(outs[0], outs[1]) < 1e-5
    # the same as keys and queries that were turned before, as complex numbers
    z = (1j * np.multiply.outer(np.arange(21), rope.inv_freq))[:, None]

    def turn(x):
        pairs = x[..., 96:].reshape(*x.shape[:-1], 16, 2)
        y = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(z) * 1.1
        rest = np.stack([y.real, y.imag], -1).reshape(*x.shape[:-1], 32)
        return np.concatenate([x[..., :96], rest], -1).astype(np.float32)

    text = Text(reference.create(), SHAPE, config_of("f16"))
    text.queries, text.keys = list(turn(q)), turn(k[:, None])[:, 0]
    assert off(outs[0][position], text.expected(position)) < 2e-3  # keys are rounded twice


def test_a_page_has_a_scale_for_each_part(make_cpu):
    """Small latents beside large turning channels keep int8's precision for themselves."""
    text = Text(make_cpu(), SHAPE, config_of("int8", sinks=0, residual=0))
    text.write(PAGE)
    exact, seen = text.keys.astype(np.float64), text.seen(PAGE)
    latent = np.abs(exact[:, :96]).max(1, keepdims=True)
    assert (np.abs(seen - exact)[:, :96] <= latent * (1 / 254 + 2**-10)).all()
    page = int(text.store._sequences[text.sequence].tables[0, 0, 0, 1])
    at = reference.page_at(page, 128 * PAGE + 2 * 2 * PAGE)
    scales = [at[start : start + 2 * PAGE].view("<f2") for start in (96 * PAGE, len(at) - 2 * PAGE)]
    for part, scale in zip((exact[:, :96], exact[:, 96:]), scales, strict=True):
        np.testing.assert_allclose(scale, np.abs(part).max(1) / 127, rtol=2e-3)


@pytest.mark.parametrize("counts", [(2, 3), (40, 70), (1, 130)])
def test_sequences_share_a_batch_and_a_prefix(counts, make_cpu):
    """A fork reads on beside the sequence that it came from, as each would alone."""
    text = Text(make_cpu(), SHAPE, config_of("int8", residual=0))
    text.write(100)
    other, store = text.store.fork(text.sequence), text.store
    q, k = text.draw(sum(counts))
    cuts = [slice(0, counts[0]), slice(counts[0], None)]
    alone = []
    for sequence, cut in zip((text.sequence, other), cuts, strict=True):
        own = store.fork(sequence)
        alone.append(text.write(len(k[cut]), None, own, (q[cut], k[cut])))
        store.free(own)
    batch = [
        (s, np.zeros(n, np.int32)) for s, n in zip((text.sequence, other), counts, strict=True)
    ]
    step = store.begin(batch, np.zeros(1, np.int32))
    text.backend._programs.clear()

    def verb(dev, step, q, k):
        return dev.attention(step, 0, q, k, None, None, SCALE)

    together = result(text.backend, verb, q, k[:, None], step=step)
    store.commit()
    assert off(together.reshape(len(q), 6, -1), np.concatenate(alone)) < 1e-5
    # back to a page's start, where nothing exact is lost
    assert store.truncate(other, 60) == 4
    text.write(30, None, other, (q[:30], k[:30]) if len(q) > 29 else text.draw(30))
    for sequence in (text.sequence, other):
        store.free(sequence)
    assert store.nbytes == 0


def test_a_batch_that_breaks_off_leaves_the_store_as_it_was(make_cpu):
    text = Text(make_cpu(), SHAPE, config_of("int8", residual=0))
    text.write(100)
    before = text.store.nbytes
    text.store.begin([(text.sequence, np.zeros(90, np.int32))], np.zeros(1, np.int32))
    text.store.abort()
    assert (text.store.nbytes, text.store.length(text.sequence)) == (before, 100)
    k = text.draw(1)
    k[1][0, 100] = np.nan
    with pytest.raises(NumericsError, match="layer 0, position 100"):
        text.write(1, given=k)
