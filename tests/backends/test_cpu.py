"""The CPU backend's verbs and runs against NumPy, the reference and itself."""

from __future__ import annotations

import numpy as np
import pytest
from verbs import Run, Source, Tiny, U, plain_step, result, source, values_of

from pykv.backends import reference
from pykv.backends.crew import Crew
from pykv.config import CacheConfig
from pykv.errors import CancelledError, NumericsError, UnsupportedError

RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return RNG.normal(0, scale, shape).astype(np.float32)


def both(make_cpu, verb, *arrays, step=None):
    """The verb's result on the CPU and on the reference."""
    return (
        result(make_cpu(), verb, *arrays, step=step),
        result(reference.create(), verb, *arrays, step=step),
    )


def assert_product(y, x, w, add=0):
    """y = x @ w.T + add, within any order of float32 sums.

    Higham, section 3.1: n roundings on the way of a product leave an error below n u / (1 - n u)
    of the sum of magnitudes.
    """
    exact = x.astype(np.float64) @ w.T + add
    n = x.shape[1] + 1
    size = np.abs(x.astype(np.float64)) @ np.abs(w).T + np.abs(add)
    assert (np.abs(y - exact) <= n * U / (1 - n * U) * size).all()


@pytest.mark.parametrize("type_", ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_linear(make_cpu, type_, rows):
    tensor, x = source(type_, normal(130, 96)), normal(rows, 96)
    y = result(make_cpu(), lambda d, _, x: d.linear(x, d.load(tensor)), x)
    assert_product(y, x, values_of(tensor))


@pytest.mark.parametrize("rows", [1, 4, 5, 9])
def test_linear_adds_row_by_row_where_it_is_deterministic(make_cpu, rows):
    tensor, x, add = source("q8_0", normal(33, 64)), normal(rows, 64), normal(rows, 33)
    y = result(
        make_cpu(deterministic=True), lambda d, _, x, a: d.linear(x, d.load(tensor), a), x, add
    )
    assert_product(y, x, values_of(tensor), add)


@pytest.mark.parametrize("type_", ["f32", "f16"])
@pytest.mark.parametrize("n_in", [1, 15, 80, 100])
@pytest.mark.parametrize("rows", [2, 8])
def test_linear_of_a_width_that_32_does_not_divide(make_cpu, caplog, type_, n_in, rows):
    tensor, x, add = source(type_, normal(7, n_in), "blk.0.x"), normal(rows, n_in), normal(rows, 7)
    y = result(make_cpu(), lambda d, _, x, a: d.linear(x, d.load(tensor), a), x, add)
    assert_product(y, x, values_of(tensor), add)
    assert f"blk.0.x has rows of {n_in} values" in caplog.text


def test_a_large_product_is_made_a_panel_at_a_time(make_cpu, monkeypatch):
    monkeypatch.setattr("pykv.backends.products.PANEL_BYTES", 10_000)
    tensor, x, add = source("f16", normal(301, 96)), normal(11, 96), normal(11, 301)
    y = result(make_cpu(), lambda d, _, x, a: d.linear(x, d.load(tensor), a), x, add)
    assert_product(y, x, values_of(tensor), add)


@pytest.mark.parametrize(("type_", "width"), [("q8_0", 96), ("f16", 96), ("f16", 80), ("f32", 33)])
@pytest.mark.parametrize("tokens", [[5], [0, 9, 9, 2], [3, 1, 4, 1, 5, 9, 2, 6, 5]])
def test_embed_takes_the_tokens_rows(make_cpu, type_, width, tokens):
    tensor = source(type_, normal(10, width))
    step = plain_step(len(tokens), tokens)
    y = result(make_cpu(), lambda d, s: d.embed(d.load(tensor), s), step=step)
    # a code times its scale is exact in float32
    np.testing.assert_array_equal(y, values_of(tensor)[tokens])


@pytest.mark.parametrize("n", [1, 5, 16, 33, 80])
@pytest.mark.parametrize("rows", [1, 9])
def test_exact_verbs(make_cpu, n, rows):
    x, y, b = normal(rows, n), normal(rows, n), source("f32", normal(n))
    verbs = [
        lambda d, s, x, y: d.add(x, y),
        lambda d, s, x, y: d.bias(x, d.load_vector(b)),
        lambda d, s, x, y: d.scale(x, 0.3),
        lambda d, s, x, y: d.scale(x, 3),
        lambda d, s, x, y: d.take_rows(x, s),
    ]
    outputs = [rows - 1, 0, rows // 2]
    for verb in verbs:
        got, expected = both(make_cpu, verb, x, y, step=plain_step(rows, outputs=outputs))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("n", [1, 5, 64, 80, 100])
@pytest.mark.parametrize("heads", [None, 3])
def test_rms_norm(make_cpu, n, heads):
    x = normal(10, n) if heads is None else normal(10, heads, n)
    x.reshape(10, -1)[3] *= 1e-4  # where eps counts
    w = source("f32", normal(n))
    got = result(make_cpu(), lambda d, _, x: d.rms_norm(x, d.load_vector(w), 1e-5), x)
    exact = (
        x
        / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
        * w.data.view(np.float32)
    )
    # n / 16 + 5 roundings of the squares' sum, halved by the root; six more follow
    np.testing.assert_allclose(got, exact, rtol=(n / 32 + 9) * U, atol=0)


LARGE = np.array(
    [0, -0.0, 1e-30, 1, -1, 9, -9, 40, -40, 88, -88, 1e3, -1e3, 1e20, -1e20, 1e30, -1e30]
)


def gelu64(x):
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return x / (1 + np.exp(np.minimum(-2 * u, 700)))


def silu64(x):
    return x / (1 + np.exp(np.minimum(-x, 700)))


@pytest.mark.parametrize(("verb", "exact"), [("swiglu", silu64), ("geglu", gelu64)])
@pytest.mark.parametrize("rows", [1, 8])
def test_gates(make_cpu, verb, exact, rows):
    gate = np.tile(np.concatenate([LARGE, normal(8300, scale=3)]), (rows, 1)).astype(np.float32)
    up = normal(*gate.shape)
    got, oracle = both(make_cpu, lambda d, _, g, u: getattr(d, verb)(g, u), gate, up)
    expected = exact(gate.astype(np.float64)) * up
    # exp's argument is within 2 roundings of up to 88, and exp within 2e-7 (math_numba); it ends at
    # e**88, so that -1e30 keeps 1e30 / e**88
    np.testing.assert_allclose(got, expected, rtol=88 * 2 * U + 1e-6, atol=4e30 / np.exp(88))
    # tanh cancels where the reference's gelu is small
    np.testing.assert_allclose(oracle, expected, rtol=2e-5, atol=100 * U)


@pytest.mark.parametrize("limit", [30.0, 50])
def test_softcap(make_cpu, limit):
    x = np.concatenate([LARGE, normal(500, scale=60)]).astype(np.float32)[None]
    got = result(make_cpu(), lambda d, _, x: d.softcap(x, limit), x)
    exact = limit * np.tanh(x.astype(np.float64) / limit)
    # 1 - 2 / (e + 1): a few roundings of numbers up to 1, and exp's 2e-7, times the limit
    np.testing.assert_allclose(got, exact, rtol=0, atol=limit * 1e-6)


# weights without a kernel


def test_a_type_without_kernels_is_decoded_and_the_warning_says_what_that_costs(make_cpu, caplog):
    blocks = RNG.integers(0, 256, (512, 66), dtype=np.uint8)  # tq2_0: 64 bytes of codes, a half
    blocks[:, 64:] = RNG.normal(0, 0.1, 512).astype("<f2")[:, None].view(np.uint8)
    tensor = Source("blk.3.ffn_up.weight", (256, 512), "tq2_0", blocks.reshape(256, 132))
    for rows in (1, 8):
        x = normal(rows, 512)
        y = result(make_cpu(), lambda d, _, x: d.linear(x, d.load(tensor)), x)
        assert_product(y, x, values_of(tensor))
    assert "blk.3.ffn_up.weight has type tq2_0" in caplog.text
    assert "0.5 MiB" in caplog.text


def test_a_type_that_nobody_can_decode_is_refused(make_cpu):
    tensor = Source("output.weight", (2, 64), "q9_9", np.zeros((2, 36), np.uint8))
    with pytest.raises(UnsupportedError, match=r"output.weight has type q9_9, which neither"):
        make_cpu().load(tensor)


def test_a_cache_type_without_kernels_is_refused(make_cpu):
    from pykv.backends.base import CacheFormats, LayerShape

    formats = CacheFormats("f16", "q6_k", "f16", "f16")
    with pytest.raises(UnsupportedError, match="cache type q6_k has no CPU kernels; use"):
        make_cpu().prepare([LayerShape(1, 1, 32, 32)], [formats])


# runs of a small model

TOKENS = np.random.default_rng(1).integers(0, Tiny.vocabulary, 1600)
EXACT = CacheConfig(sinks=3)
ENCODED = CacheConfig("f16", "bf16", 3, 5, "f32")


@pytest.fixture
def make_run(make_cpu):
    def make(config=EXACT, **settings):
        return Run(make_cpu(**settings), config)

    return make


def close(a, b):
    """Rows differ by what the design allows an attention, in each of two layers."""
    error = np.linalg.norm(a - b, axis=-1)
    assert (error <= 2e-5 * np.linalg.norm(b, axis=-1)).all()


# in types that keep what they are given, a last bit in a projection moves no code
@pytest.mark.parametrize("config", [CacheConfig("f32", "f32", 3), CacheConfig("f32", "f32", 0)])
def test_a_model_gives_the_references_logits(make_run, config):
    run, oracle = make_run(config), Run(reference.create(), config)
    close(run.read(TOKENS[:40]), oracle.read(TOKENS[:40]))
    close(run.read(TOKENS[40:46], 1), oracle.read(TOKENS[40:46]))
    other = run.store.new_sequence(), oracle.store.new_sequence()
    a, b = (
        r.step([(o, TOKENS[:5]), (r.sequence, TOKENS[46:50])])
        for r, o in zip((run, oracle), other, strict=True)
    )
    close(a, b)
    a, b = (
        r.step([(r.sequence, TOKENS[50:51]), (o, TOKENS[5:6])])
        for r, o in zip((run, oracle), other, strict=True)
    )
    close(a, b)


@pytest.mark.parametrize("config", [EXACT, ENCODED])
def test_deterministic_logits_are_the_same_bits_for_every_split_and_thread_count(make_run, config):
    settings = {"deterministic": True}
    expected = make_run(config, **settings).read(TOKENS[:150])
    for size, threads in ((1, 2), (7, 1), (4, 2), (150, 1), (64, 2)):
        got = make_run(config, threads=threads, **settings).read(TOKENS[:150], size)
        np.testing.assert_array_equal(got, expected)
    forked = make_run(config, **settings)
    forked.read(TOKENS[:70])
    forked.sequence = forked.store.fork(forked.sequence)
    np.testing.assert_array_equal(forked.read(TOKENS[70:150]), expected[70:])


def test_one_thread_and_two_give_the_same_bits(make_run):
    one, two = make_run(threads=1), make_run(threads=2)
    for n in (120, 1, 3, 9):
        np.testing.assert_array_equal(one.read(TOKENS[:n]), two.read(TOKENS[:n]))


def test_a_program_run_again_gives_what_a_fresh_one_does(make_run):
    kept, fresh = make_run(), make_run()
    for run in (kept, fresh):
        run.read(TOKENS[:1470])
    # table entries 24 and up are the fourth chunk, and begin at 3 + 23 * 64 = 1475
    for i in range(1470, 1480):
        fresh.backend._programs.clear()
        a, b = (r.read(TOKENS[i : i + 1]) for r in (kept, fresh))
        np.testing.assert_array_equal(a, b)
    assert len(kept.backend._programs) == 1
    # back to a short context with the same program
    other = [r.store.new_sequence() for r in (kept, fresh)]
    fresh.backend._programs.clear()
    a, b = (r.step([(s, TOKENS[:1])]) for r, s in zip((kept, fresh), other, strict=True))
    np.testing.assert_array_equal(a, b)


def test_a_program_is_for_one_kind_of_cache(make_run):
    run = make_run()
    alone = run.read(TOKENS[:3], 1)
    run.store = Run(run.backend, CacheConfig("f32", "f16", 0)).store
    run.sequence = run.store.new_sequence()
    got = run.read(TOKENS[:3], 1)
    expected = make_run(CacheConfig("f32", "f16", 0)).read(TOKENS[:3], 1)
    np.testing.assert_array_equal(got, expected)
    assert (got != alone).any()


# what goes wrong


def damaged(run, monkeypatch, layer, side, value):
    """The model's keys (0) or values (1) of the batch's second row hold `value` in that layer."""
    plain = type(run.backend).attention

    def attention(backend, step, i, q, k, v, *rest):
        if i == layer:
            target = feed_after(backend, (k, v)[side], value)
            k, v = (target, v) if side == 0 else (k, target)
        return plain(backend, step, i, q, k, v, *rest)

    monkeypatch.setattr(type(run.backend), "attention", attention)


def feed_after(backend, x, value):
    """x plus `value` at row 1, channel 3 of its first head."""
    flat = x.reshape(x.shape[0], -1)
    n = flat.shape[0] * flat.shape[1]
    more, out = np.zeros(n + 16, np.float32), backend.buffer(*flat.shape)
    more[flat.shape[1] + 3] = value
    backend.emit("add", 1, flat, more, out, n, 1.0)
    return out.reshape(*x.shape)


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize(("layer", "side"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_the_store_goes_on(
    make_run, monkeypatch, rows, layer, side, value
):
    run, calm = make_run(), make_run()
    for r in (run, calm):
        r.read(TOKENS[:30])
    with monkeypatch.context() as patch:
        damaged(run, patch, layer, side, value)
        with pytest.raises(NumericsError, match=f"layer {layer}, position 31: a key or value"):
            run.read(TOKENS[30 : 30 + rows])
    assert run.store.length(run.sequence) == 30
    run.backend._programs.clear()  # as if there had been no damage
    np.testing.assert_array_equal(run.read(TOKENS[30:50]), calm.read(TOKENS[30:50]))


@pytest.mark.parametrize("rows", [2, 20])
def test_a_value_too_large_for_the_tail_is_clamped_and_reported_once(
    make_run, monkeypatch, caplog, rows
):
    run = make_run()
    damaged(run, monkeypatch, 1, 1, -1e6)
    run.read(TOKENS[:rows])
    assert caplog.text.count("layer 1: 1 keys or values beyond the range") == 1
    table = run.store._sequences[run.sequence].tables
    from page_oracle import bytes_at, cells_of, codec

    page = bytes_at(int(table[1, 1, 0, 0]), codec("f16").page_bytes(48, "value", 16))
    assert cells_of(page, codec("f16"), 1, 48, 16, 2)[0, 1, 3] == -65504
    run.read(TOKENS[:rows])
    assert caplog.text.count("beyond the range") == 1


def test_a_wider_tail_takes_large_values(make_run, monkeypatch, caplog):
    run = make_run(CacheConfig("bf16", "bf16"))
    damaged(run, monkeypatch, 0, 0, 1e30)
    run.read(TOKENS[:3])
    assert caplog.text == ""


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("call", [1, 3])
def test_ctrl_c_leaves_the_backend_usable(make_run, monkeypatch, rows, call):
    run, calm = make_run(), make_run()
    plain, calls = Crew.run, 0

    def interrupted(crew, *args):
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        plain(crew, *args)

    for r in (run, calm):
        r.read(TOKENS[:60])
        r.read(TOKENS[60:61])
    monkeypatch.setattr(Crew, "run", interrupted)
    if rows == 1:
        run.backend._programs.clear()
        monkeypatch.setattr("pykv.backends.program.SLICE_BYTES", 1)
    run.backend._program = run.backend._new_program()
    with pytest.raises(KeyboardInterrupt):
        run.read(TOKENS[61 : 61 + rows])
    assert run.store.length(run.sequence) == 61
    monkeypatch.undo()
    for n in (rows, 1, 9):
        np.testing.assert_array_equal(run.read(TOKENS[61 : 61 + n]), calm.read(TOKENS[61 : 61 + n]))


@pytest.mark.parametrize("rows", [1, 40])
def test_a_run_can_be_cancelled(make_run, rows):
    run, calm = make_run(), make_run()
    for r in (run, calm):
        r.read(TOKENS[:60])
    step = run.store.begin([(run.sequence, np.zeros(rows, np.int32))], np.zeros(1, np.int32))
    step.cancelled = lambda: True
    with pytest.raises(CancelledError):
        run.backend.run(run.graph, step)
    run.store.abort()
    for n in (rows, 1):
        np.testing.assert_array_equal(run.read(TOKENS[60 : 60 + n]), calm.read(TOKENS[60 : 60 + n]))


def test_the_plan_says_what_was_chosen(make_run):
    plan = "\n".join(make_run(threads=2).backend.plan)
    assert "2 threads" in plan
    assert "weights: f16, f32, q8_0" in plan
    assert "attend_f16_f16_f16_f16" in plan
