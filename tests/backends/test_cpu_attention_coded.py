"""Attention over pages of codes on the CPU, through the store's oracle.

Each format is once the keys' and once the values', with another partner, width, group, transform,
tail, residual and number of sinks.
"""

from __future__ import annotations

import numpy as np
import pytest
from page_oracle import Formats
from verbs import BackendOracle

from pykv.backends.base import LayerShape

# formats, tail and transforms; key and value width, query heads per KV head; sinks, residual
# (these pairs and groups are other tests' too)
FEW = [
    (Formats("q8_0", "q8_0"), 32, 32, 4, 4, 0),
    (Formats("fp8_e4m3", "tq4"), 5, 33, 3, 4, 0),
    (
        Formats("kivi2", "q4_0", None, "none", "lowrank:20", position="read", calibrated=True),
        *(40, 40, 3, 4, 30),
    ),
]
# the rest takes long to compile; every format's functions are in contract/test_every_cache_kernel
MORE = [
    (Formats("q8_0", "q4_0"), 32, 32, 1, 4, 0),
    (Formats("tq3", "kivi4"), 5, 33, 2, 4, 0),
    (
        Formats("f16", "q8_0", None, "none", "lowrank:20", position="read", calibrated=True),
        *(40, 40, 1, 4, 30),
    ),
    (Formats("q4_1", "int8", None, "random"), 80, 80, 7, 1, 0),
    (Formats("fp8_e4m3", "iq4_nl"), 64, 64, 4, 4, 5),
    (Formats("f16", "f16", None, "random", "hadamard"), 40, 64, 2, 4, 0),
    (Formats("q5_1", "kivi2", "f32"), 40, 72, 3, 0, 20),
    (Formats("q5_0", "fp8_e4m3", None, "none", "random"), 64, 64, 4, 4, 64),
    (Formats("q4_0", "q8_0", None, "none"), 72, 40, 8, 16, 3),
    (Formats("iq4_nl", "q5_1", "bf16", "auto", "none"), 96, 112, 9, 4, 64),
    (Formats("int8", "kivi3"), 112, 96, 1, 4, 40),
    (Formats("kivi2", "tq4"), 128, 128, 4, 20, 70),
    (Formats("kivi3", "q4_1", "f32", "hadamard"), 192, 256, 2, 4, 0),
    (Formats("kivi4", "q5_0", None, "random", "none"), 100, 100, 3, 3, 64),
    (Formats("tq4", "fp8_e5m2"), 256, 192, 1, 0, 1),
    (Formats("fp8_e5m2", "tq3", "f32", "hadamard"), 32, 80, 3, 4, 64),
    (Formats("kivi2", "fp8_e4m3", position="read", calibrated=True), 72, 32, 7, 4, 0),
    (Formats("nuq3", "nuq4:outliers=1%", calibrated=True), 64, 40, 3, 4, 64),
    (
        Formats("nuq2:outliers=2%", "nuq3", "f32", "auto", "random", calibrated=True),
        40,
        72,
        5,
        0,
        3,
    ),
    (Formats("q4_0", "nuq2", None, "lowrank:33", "lowrank:40", calibrated=True), 64, 64, 2, 4, 0),
]
CASES = [
    *(pytest.param(*case, id=f"{case[0].page_k}-{case[0].page_v}") for case in FEW),
    *(
        pytest.param(*case, id=f"{case[0].page_k}-{case[0].page_v}", marks=pytest.mark.slow)
        for case in MORE
    ),
]
CASE = pytest.mark.parametrize(("formats", "d_k", "d_v", "group", "sinks", "residual"), CASES)


def oracle_of(backend, formats, shapes, sinks=4, residual=None, seed=0):
    config = formats.config(sinks, residual)
    o = BackendOracle(config, shapes, 5000, seed, backend, formats.calibrated)
    backend.prepare(shapes, o.store.formats)
    return o


def encoded_sides(o):
    """Layers and sides that have encoded pages."""
    sides = [(i, side) for i in range(len(o.layers)) for side in (0, 1)]
    return {(i, side) for i, side in sides if not o.layers[i].sides[side].exact}


def conversation(o, more=0):
    """A prompt, single tokens, several sequences in a batch, a fork, and back to an earlier end."""
    a, b = o.new(), o.new()
    o.write({a: o.tokens(90 + more)})
    o.write({a: o.tokens(1)})
    o.write({a: o.tokens(3), b: o.tokens(2)})
    o.write({b: o.tokens(40), a: o.tokens(70)})
    c = o.fork(a)
    o.write({a: o.tokens(1), c: o.tokens(1), b: o.tokens(1)})
    o.write({c: o.tokens(5), b: o.tokens(60)})
    o.check()
    o.truncate(c, len(o.sequences[c]) - 9)
    o.write({c: o.tokens(80)})
    o.write({c: o.tokens(1)})
    o.free(a)
    o.check()
    return b, c


@pytest.mark.parametrize("deterministic", [False, True])
@CASE
def test_formats_widths_and_groups(
    make_cpu, formats, d_k, d_v, group, sinks, residual, deterministic
):
    shapes = [LayerShape(2 * group, 2, d_k, d_v), LayerShape(group, 1, d_k, d_v, window=77)]
    backend = make_cpu(deterministic=deterministic)
    o = oracle_of(backend, formats, shapes, sinks, residual, seed=d_k)
    conversation(o)
    assert o.ever == encoded_sides(o)


# formats that differ by layer, with residuals of their own

LAYERS = "0=v:kivi2;1=k:q4_0;2=k:f16,v:f16"


@pytest.mark.parametrize(
    ("formats", "residual", "residuals"),
    [
        (Formats("kivi2", "q4_0", override=LAYERS), None, [128, 64, 0]),
        (Formats("f16", "f16", override="1-2=k:q4_0,v:q4_0"), None, [0, 64, 64]),
        (Formats("kivi2", "q4_0", override=LAYERS), 10, [10, 10, 10]),
    ],
)
def test_layers_of_several_formats(make_cpu, formats, residual, residuals):
    shapes = [LayerShape(3, 1, 64, 32), LayerShape(8, 2, 64, 32, window=100),
              LayerShape(4, 1, 32, 40)]  # fmt: skip
    o = oracle_of(make_cpu(), formats, shapes, residual=residual)
    conversation(o, more=130)
    assert o.ever == encoded_sides(o)
    assert [layer.residual for layer in o.layers] == residuals


# contexts of several chunks, and windows that begin in the middle of one


@pytest.mark.parametrize("window", [0, 700])
def test_long_contexts(make_cpu, window):
    formats, d, _, group, sinks, _ = FEW[0]
    o = oracle_of(make_cpu(), formats, [LayerShape(group, 1, d, d, window)], sinks)
    a, b = o.new(), o.new()
    o.write({a: o.tokens(1500)})
    for n in (1, 3, 30):
        o.write({a: o.tokens(n), b: o.tokens(1)})
    o.write({a: o.tokens(600)})
    o.write({b: o.tokens(1), a: o.tokens(1)})
    o.check()


# invariants (a) and (b): how tokens are batched


@CASE
def test_splits_agree_and_leave_the_same_pages(make_cpu, formats, d_k, d_v, group, sinks, residual):
    shape, n = LayerShape(group, 1, d_k, d_v, window=120), 210
    q = np.random.default_rng(3).normal(0, 1, (n, group, d_k)).astype(np.float32)
    outputs, states = {}, []
    for size, deterministic in ((n, False), (n, True), (13, False), (7, True), (1, False)):
        backend = make_cpu(deterministic=deterministic)
        o = oracle_of(backend, formats, [shape], sinks, residual)
        sequence, tokens, outs = o.new(), o.tokens(n), []
        for i in range(0, n, size):
            part = tokens[i : i + size]
            step = o.begin({sequence: part})
            k, v = (np.stack([getattr(t, x)[0] for t in part]) for x in ("keys", "values"))
            outs.append(o.attention(step, 0, q[i : i + size], k, v).reshape(-1, group, d_v))
            o.sequences[sequence] += part
            o.learn(sequence, i + len(part))
            o.store.commit()
        o.check()
        outputs[size, deterministic] = np.concatenate(outs)
        states.append((o.state(sequence), o.store.nbytes))
    assert all(state == states[0] for state in states)
    # the design's bound between two ways to the same output
    expected = outputs[n, False]
    for out in outputs.values():
        error = np.linalg.norm(out - expected, axis=-1)
        assert (error <= 1e-5 * np.linalg.norm(expected, axis=-1)).all()
    # the same kernel and the same order of sums
    np.testing.assert_array_equal(outputs[7, True], outputs[n, True])
    np.testing.assert_array_equal(outputs[1, False], outputs[n, True])
