"""The CPU's attention and its writes, through the store's oracle.

The oracle works in float64 from the tokens; it also compares the bytes of every page.
"""

from __future__ import annotations

import numpy as np
import pytest
from page_oracle import Formats, turned
from verbs import BackendOracle, result

from pykv.backends import reference
from pykv.backends.base import LayerShape, Rope
from pykv.cache.pages import HostMemory
from pykv.cache.store import Store
from pykv.config import CacheConfig

EXACT = ("f16", "f16", None)
# each type is a page's and a tail's, a wider and a narrower one's
ENCODED = ("f16", "bf16", "f32")
NARROW_TAIL = ("bf16", "f32", "f16")
# and takes long to compile
MORE = [("f16", "f16", "f32"), ("f32", "f32", "f16"), ("bf16", "f16", "f16")]
FORMATS = [ENCODED, NARROW_TAIL, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE)]


def oracle_of(backend, formats, shapes, sinks=4, residual=0, seed=0):
    config = Formats(*formats).config(sinks, residual)
    o = BackendOracle(config, shapes, 5000, seed, backend)
    backend.prepare(shapes, o.store.formats)
    return o


def conversation(o):
    """A prompt, single tokens, several sequences at once, a prompt on top, a fork."""
    a, b = o.new(), o.new()
    o.write({a: o.tokens(90)})
    for _ in range(2):
        o.write({a: o.tokens(1)})
    o.write({a: o.tokens(3), b: o.tokens(2)})
    o.write({b: o.tokens(40), a: o.tokens(70)})
    c = o.fork(a)
    o.write({a: o.tokens(1), c: o.tokens(1), b: o.tokens(1)})
    o.write({c: o.tokens(5), b: o.tokens(60)})
    o.write({c: o.tokens(1)})
    o.check()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("d_k", "d_v", "group"),
    [
        (32, 32, 1),
        (40, 72, 3),
        (64, 64, 4),
        (72, 40, 7),
        (80, 80, 8),
        (96, 112, 9),
        (112, 96, 1),
        (128, 128, 4),
        (256, 256, 3),
        (7, 5, 4),
    ],
)
def test_head_widths_and_groups(make_cpu, d_k, d_v, group, deterministic):
    shapes = [LayerShape(2 * group, 2, d_k, d_v), LayerShape(group, 1, d_k, d_v, window=77)]
    conversation(oracle_of(make_cpu(deterministic=deterministic), EXACT, shapes))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(("sinks", "residual", "window"), [(0, 0, 0), (4, 20, 90), (20, 70, 30)])
def test_formats_sinks_residuals_and_windows(make_cpu, formats, sinks, residual, window):
    shapes = [LayerShape(2, 1, 40, 33, window), LayerShape(4, 2, 33, 40)]
    conversation(oracle_of(make_cpu(), formats, shapes, sinks, residual))


@pytest.mark.parametrize("sinks", [16, 64])
def test_sinks_that_fill_their_page(make_cpu, sinks):
    shapes = [LayerShape(4, 1, 32, 32), LayerShape(4, 1, 32, 32, window=30)]
    o = oracle_of(make_cpu(), EXACT, shapes, sinks)
    a = o.new()
    for n in (sinks - 2, 1, 1, 1, 9, 30):
        o.write({a: o.tokens(n)})
        o.check()


@pytest.mark.parametrize(("formats", "window"), [(EXACT, 0), (ENCODED, 700)])
def test_long_contexts(make_cpu, formats, window):
    """Several chunks of eight pages, and windows that begin in the middle of one."""
    o = oracle_of(make_cpu(), formats, [LayerShape(2, 1, 32, 32, window)])
    a, b = o.new(), o.new()
    o.write({a: o.tokens(1500)})
    for n in (1, 3, 30):
        o.write({a: o.tokens(n), b: o.tokens(1)})
    o.write({a: o.tokens(600)})
    o.write({b: o.tokens(1), a: o.tokens(1)})
    o.check()


def test_a_launch_is_cut_so_that_ctrl_c_is_heard(make_cpu, monkeypatch):
    monkeypatch.setattr("pykv.backends.cpu_attention.LAUNCH_FLOPS", 1e5)
    monkeypatch.setattr("pykv.backends.cpu_attention.LINES_AT_ONCE", 12)
    o = oracle_of(make_cpu(), EXACT, [LayerShape(4, 1, 32, 32)])
    a = o.new()
    o.write({a: o.tokens(100)})
    o.write({a: o.tokens(61)})


# invariant (b): how tokens are batched


@pytest.mark.parametrize(
    ("formats", "window"), [(EXACT, 0), (EXACT, 80), (ENCODED, 0), (NARROW_TAIL, 80)]
)
def test_splits_agree(make_cpu, formats, window):
    outputs = {}
    for deterministic in (False, True):
        for size in (150, 13, 7, 1):
            backend = make_cpu(deterministic=deterministic)
            o = oracle_of(backend, formats, [LayerShape(2, 1, 40, 40, window)], residual=5)
            rng, sequence, tokens = np.random.default_rng(3), o.new(), o.tokens(150)
            q = rng.normal(0, 1, (150, 2, 40)).astype(np.float32)
            outs = []
            for i in range(0, 150, size):
                part = tokens[i : i + size]
                step = o.begin({sequence: part})
                k, v = (np.stack([getattr(t, x)[0] for t in part]) for x in ("keys", "values"))
                outs.append(o.attention(step, 0, q[i : i + size], k, v).reshape(-1, 2, 40))
                o.store.commit()
            outputs[deterministic, size] = np.concatenate(outs)
    expected = outputs[False, 150]
    for (deterministic, _), out in outputs.items():
        error = np.linalg.norm(out - expected, axis=-1)
        assert (error <= 1e-5 * np.linalg.norm(expected, axis=-1)).all()
        if deterministic:
            np.testing.assert_array_equal(out, outputs[True, 1])


# rotary embeddings


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("n_rot", "magnitude", "scale"), [(32, 1.0, 1), (20, 1.3, 0.2), (2, 1, 2)])
@pytest.mark.parametrize("rows", [3, 20])
def test_rope(make_cpu, neox, n_rot, magnitude, scale, rows):
    """The exact turn in float64, in attention over keys that the cache keeps as they are."""
    rng = np.random.default_rng(n_rot)
    rope = Rope(neox, 10000.0 ** (-2 * np.arange(n_rot // 2) / n_rot), magnitude)
    shape, before = LayerShape(2, 1, 32, 32), 50
    q, k, v = (rng.normal(0, 1, (before + rows, n, 32)).astype(np.float32) for n in (2, 1, 1))
    outs = []
    for backend in (make_cpu(), reference.create()):
        store = Store([shape], CacheConfig("f32", "f32"), 100, memory=HostMemory(255))
        backend.prepare([shape], store.formats)
        sequence = store.new_sequence()
        for part in (slice(0, before), slice(before, before + rows)):
            count = part.stop - part.start
            step = store.begin([(sequence, np.zeros(count, np.int32))], np.zeros(1, np.int32))
            out = result(
                backend,
                lambda d, s, *qkv: d.attention(s, 0, *qkv, rope, scale),
                *(x[part] for x in (q, k, v)),
                step=step,
            )
            store.commit()
        outs.append(out.reshape(rows, 2, 32))

    exact = [turned(x, rope, np.arange(len(x))) for x in (q, k)]
    for i in range(rows):
        p = before + i
        scores = exact[0][p] @ exact[1][: p + 1, 0].T * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ v[: p + 1, 0]
        for out in outs:
            error = np.linalg.norm(out[i] - expected, axis=-1)
            assert (error <= 1e-5 * np.linalg.norm(expected, axis=-1)).all()
