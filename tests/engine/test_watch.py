"""What a watch makes of layers that the test hands it, computed here another way."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pykv.backends.base import LayerShape, Rope
from pykv.engine import watch as module
from pykv.engine.importance import HeadInputs, importance
from pykv.engine.watch import Watch
from pykv.formats.coded import HeadNumbers, find

SHAPE = LayerShape(n_head=4, n_kv=2, d_k=16, d_v=32)
ROPE = Rope(False, 100.0 ** -(np.arange(8) / 8))
CTX, CHUNKS, SCALE = 4 + 2 * 64 + 7, 2, 0.25
TYPES = ["nuq4", "nuq2", "nuq3:outliers=1%", "fp8_e4m3", "fp8_e5m2"]


def inputs(chunk):
    rng = np.random.default_rng(chunk)
    q, k, v = (
        rng.standard_normal((CTX, n, d)).astype(np.float32) for n, d in ((4, 16), (2, 16), (2, 32))
    )
    k *= rng.gamma(2, size=(1, 2, 16)).astype(np.float32)
    k[:4] *= 50  # the sink's
    return q, k + np.float32(0.5), v


def turn(x):
    """x [T, H, D], NORM pairs, in float64."""
    angles = np.arange(len(x))[:, None, None] * ROPE.inv_freq
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def watched(types=TYPES, parts=1, n_chunks=CHUNKS):
    formats = [find(t) for t in types]
    levelled = [f for f in formats if f.calibration == "levels"]
    with ThreadPoolExecutor(2) as pool:
        watch = Watch([SHAPE], levelled, n_chunks, CTX, pool)
        for chunk in range(n_chunks):
            watch.begin(chunk)
            for part in np.array_split(np.arange(CTX), parts):
                watch(0, *(x[part] for x in inputs(chunk)), ROPE, SCALE)
        return dict(zip(types, watch.numbers(0, formats), strict=True)), watch.bases(0)


@pytest.fixture(scope="module")
def made():
    return watched()


def every(side):
    """All chunks' keys as the cache holds them, or values, f64 [tokens, G, D]; without sinks."""
    x = [turn(inputs(c)[1]) if side == "k" else inputs(c)[2].astype(float) for c in range(CHUNKS)]
    return np.concatenate([part[4:] for part in x])


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448), ("fp8_e5m2", 57344)])
def test_a_scale_takes_the_largest_magnitude_to_the_type_s_end(made, name, largest):
    numbers = made[0][name]
    keys = np.max([np.abs(turn(inputs(c)[1])).max((0, 2)) for c in range(CHUNKS)], 0)
    values = np.max([np.abs(inputs(c)[2]).max((0, 2)) for c in range(CHUNKS)], 0)
    np.testing.assert_allclose(numbers["k_scale"], keys / largest, rtol=1e-6)
    np.testing.assert_allclose(numbers["v_scale"], values / largest, rtol=1e-6)


def test_ranges_are_those_of_keys_before_rope(made):
    before = np.concatenate([inputs(c)[1][4:] for c in range(CHUNKS)])
    for name in ("nuq4", "nuq2"):
        scale, centre = made[0][name]["k_scale"], made[0][name]["k_centre"]
        np.testing.assert_allclose(centre - scale, before.min(0), atol=1e-5)
        np.testing.assert_allclose(centre + scale, before.max(0), atol=1e-5)
    # of the pages, which here are all drawn: the 7 tokens after the last whole one are not
    pages = np.concatenate([inputs(c)[1][4:132] for c in range(CHUNKS)]).astype(float)
    ordered = np.sort(pages, 0)
    at = 0.005 * 255
    low = ordered[1] + (at - 1) * (ordered[2] - ordered[1])
    high = ordered[-2] - (at - 1) * (ordered[-2] - ordered[-3])
    scale, centre = (made[0]["nuq3:outliers=1%"][f"k_{what}"] for what in ("scale", "centre"))
    np.testing.assert_allclose(centre - scale, low, atol=1e-5)
    np.testing.assert_allclose(centre + scale, high, atol=1e-5)


def weights(chunk):
    """Of values [128, G, 1] and of key channels [128, G, D], of the tokens in pages."""
    q, k, v = inputs(chunk)
    q, k = turn(q * np.float32(SCALE)).astype(np.float32), turn(k).astype(np.float32)
    rows = np.arange(4, 132)
    found = [
        importance(HeadInputs(q[:, 2 * g : 2 * g + 2].transpose(1, 0, 2), k[:, g], v[:, g], 0),
                   ROPE, rows)
        for g in range(2)
    ]  # fmt: skip
    return np.stack([w for w, _ in found], 1)[..., None], np.stack([w for _, w in found], 1)


def placed(name, numbers, side):
    """Numbers in their ranges and their weights, outliers left out."""
    format_, x_all, w_all = find(name), [], []
    for chunk in range(CHUNKS):
        x = inputs(chunk)[1 if side == "key" else 2]
        w = weights(chunk)[side == "key"]
        for g, first in np.ndindex(2, 2):
            page = x[4 + 64 * first : 68 + 64 * first, g]
            head = None
            if side == "key":
                head = HeadNumbers(numbers["k_scale"][g], numbers["k_centre"][g])
            rest, taken = format_.set_apart(page, side, head)
            if side == "key":
                scale, centre = head.scale, head.centre
            else:
                low, high = rest.min(1, keepdims=True), rest.max(1, keepdims=True)
                scale, centre = (high - low) / 2, (high + low) / 2
            own = w[64 * first : 64 * first + 64, g] * scale**2
            x_all.append(((rest - centre) / scale)[~taken])
            w_all.append(np.broadcast_to(own, page.shape)[~taken])
    return np.concatenate(x_all).clip(-1, 1), np.concatenate(w_all)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", TYPES[:3])
def test_levels_are_the_weighted_means_of_what_is_nearest(made, name, side):
    numbers = made[0][name]
    levels = numbers[f"{side[0]}_levels"].astype(float)
    assert levels.shape == (2 ** find(name).bits,)
    assert (np.diff(levels) > 0).all()
    x, w = placed(name, numbers, side)
    near = np.abs(x[:, None] - levels).argmin(1)
    means = [np.average(x[near == i], weights=w[near == i]) for i in range(len(levels))]
    # some numbers at a cell's end, and the float16 range of a value, are here on the other side
    np.testing.assert_allclose(levels, means, atol=6e-3)
    even = np.linspace(-1, 1, len(levels))
    spread = [(w * np.min((x[:, None] - at) ** 2, 1)).sum() for at in (levels, even)]
    assert spread[0] < 0.9 * spread[1]


@pytest.mark.parametrize("side", ["k", "v"])
def test_bases_are_right_singular_vectors(made, side):
    basis, singular = made[1][f"{side}_basis"], made[1][f"{side}_singular"]
    for g in range(2):
        x = every(side)[:, g]
        _, s, vt = np.linalg.svd(x, full_matrices=False)
        np.testing.assert_allclose(singular[g], s, rtol=1e-4)
        np.testing.assert_allclose(np.abs(basis[g].T @ vt.T), np.eye(len(s)), atol=1e-3)
        assert (basis[g].max(0) == np.abs(basis[g]).max(0)).all()
        half = basis[g][:, : len(s) // 2]
        lost = np.linalg.norm(x - x @ half @ half.T)
        assert lost == pytest.approx(np.sqrt((s[len(s) // 2 :] ** 2).sum()), rel=1e-4)


def test_neither_parts_of_a_chunk_nor_another_run_change_anything(made):
    for again in (watched(), watched(parts=5)):
        for name, arrays in [*again[0].items(), ("bases", again[1])]:
            first = made[1] if name == "bases" else made[0][name]
            for key, array in arrays.items():
                np.testing.assert_array_equal(array, first[key], err_msg=f"{name} {key}")


def test_what_is_held_has_a_bound(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 0)
    monkeypatch.setattr(module, "LEAST_SAMPLE", 70)  # tokens: a page of each chunk
    rows = []
    real = module.importance
    monkeypatch.setattr(
        module, "importance", lambda given, rope, r: rows.append(r) or real(given, rope, r)
    )
    watched(["nuq4"], n_chunks=6)
    assert {len(r) for r in rows} == {64}
    assert all((np.diff(r) == 1).all() and (r[0] - 4) % 64 == 0 for r in rows)
    assert len({int(r[0]) for r in rows}) > 1


def test_silent_heads_get_a_scale_of_one():
    with ThreadPoolExecutor(1) as pool:
        watch = Watch([SHAPE], [], 1, CTX, pool)
        watch.begin(0)
        q, k, v = (np.zeros_like(x) for x in inputs(0))
        watch(0, q, k, v, None, SCALE)
        (numbers,) = watch.numbers(0, [find("fp8_e4m3")])
    assert {side: a.tolist() for side, a in numbers.items()} == {
        "k_scale": [1, 1], "v_scale": [1, 1],
    }  # fmt: skip
