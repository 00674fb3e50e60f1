"""The errors of a watch against attention through the cache itself, on the reference backend."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pykv.backends.base import LayerShape, Rope
from pykv.backends.reference import ReferenceBackend
from pykv.cache import layout
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.engine import kv_errors
from pykv.engine.kv_errors import PARTS, Candidate, Watch
from pykv.errors import NumericsError
from pykv.formats.coded import HeadNumbers, find

N = 290  # tokens: the first query of the last quarter sees a page, whatever the type
ROPE = Rope(True, 100.0 ** -(np.arange(8) / 8))
SCALE = 0.3
# both sides sum float32 products, in another order: 290 terms of weights that sum to 1 differ by at
# most 290 * 2**-24 of the largest
ORDER = 2e-5
UNEVEN = np.sort(np.random.default_rng(5).uniform(-1, 1, 8)).astype(np.float32)


def inputs(shape, n=N, seed=0):
    """q, k and v of a layer, some channels of k larger than the others."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n, shape.n_head, shape.d_k)).astype(np.float32)
    k = rng.standard_normal((n, shape.n_kv, shape.d_k)).astype(np.float32)
    v = rng.standard_normal((n, shape.n_kv, shape.d_v)).astype(np.float32)
    k[:, :, 3] *= 4
    return q, k, v


def calibrated(formats, shape):
    """Numbers of one layer for a type's formats, some for each of its heads; or none."""
    rng = np.random.default_rng(9)

    def heads(name, transform, d, keys):
        wants, out = find(name).calibration, []
        for g in range(shape.n_kv):
            scale, centre, levels = None, None, UNEVEN if wants == "levels" else None
            if wants == "scale":
                scale = np.float32(0.01 * (1 + g))
            elif wants == "levels" and keys:
                scale, centre = np.full(d, 3 + g, np.float32), np.full(d, 0.1, np.float32)
            basis = np.linalg.qr(rng.standard_normal((d, d)))[0].astype(np.float32)
            given = basis if transform.startswith("lowrank") else None
            out.append(HeadNumbers(scale, centre, levels, given))
        return out

    return [
        (
            heads(formats.page_k, formats.transform_k, shape.d_k, True),
            heads(formats.page_v, formats.transform_v, shape.d_v, False),
        )
    ]


def candidate(name, shape, cache=CacheConfig()):  # noqa: B008
    alone = CacheConfig(**{**vars(cache), "type_k": name, "type_v": name})
    layouts = layout.layouts_of(alone, [shape])
    return Candidate(name, layouts, calibrated(layouts[0].formats, shape))


def watched(tried, shape, chunks, *, rope=ROPE, sinks=4, parts=(), unturned=False, threads=2):
    """A watch that has seen these chunks of a layer, each cut at `parts`."""
    with ThreadPoolExecutor(threads) as pool:
        n = len(chunks[0][0])
        watch = Watch([shape], tried, sinks, n, len(chunks), unturned, pool, None)
        for chunk in chunks:
            for some in zip(*(np.split(x, parts) for x in chunk), strict=True):
                watch(0, *some, rope, SCALE)
    return watch


def through_the_cache(shape, cache, chunk, rope):
    """The last quarter's attention output, f32 [R, H, D], from a store of that kind."""
    n, formats = len(chunk[0]), layout.layouts_of(cache, [shape])[0].formats
    store = Store([shape], cache, n, numbers=calibrated(formats, shape))
    step = store.begin([(store.new_sequence(), np.zeros(n, np.int32))], np.empty(0, np.int32))
    out = ReferenceBackend().attention(step, 0, *chunk, rope, SCALE)
    return out.reshape(n, shape.n_head, -1)[n - n // 4 :]


def expected(name, shape, chunk, cache, rope, part):
    """Each KV head's error, from attention through two stores."""
    both = {"type_k": name, "type_v": name}
    if part != "both":
        both["type_v" if part == "keys" else "type_k"] = "f32"
    # what stays exact is not mapped either
    how = vars(cache) | {"transform_k": "none", "transform_v": "none"} | both
    for side in "kv":
        if both[f"type_{side}"] == name:
            how[f"transform_{side}"] = getattr(cache, f"transform_{side}")
    exact = through_the_cache(shape, CacheConfig(type_k="f32", type_v="f32"), chunk, rope)
    other = through_the_cache(shape, CacheConfig(**how), chunk, rope)
    heads = (len(exact), shape.n_kv, -1)
    wrong, right = ((x.reshape(heads)) for x in (other - exact, exact))
    return np.sqrt((wrong**2).sum((0, 2)) / (right**2).sum((0, 2)))


PLAIN = LayerShape(4, 2, 32, 32)
CASES = [
    ("f16", PLAIN, {}),
    ("bf16", PLAIN, {}),
    ("q8_0", PLAIN, {}),
    ("q4_0", PLAIN, {}),
    ("q5_1", LayerShape(3, 1, 40, 24), {}),  # a width that no block divides
    ("iq4_nl", PLAIN, {"transform_k": "none", "sinks": 0}),
    ("int8", PLAIN, {"transform_v": "hadamard", "residual": 7, "sinks": 17}),
    ("fp8_e4m3", PLAIN, {}),
    ("kivi2", PLAIN, {}),
    ("kivi3", LayerShape(6, 2, 40, 40), {"tail_type": "bf16"}),
    ("kivi4", PLAIN, {"position": "read"}),
    ("kivi2", LayerShape(4, 2, 32, 32, 150), {}),  # a window
    ("q4_0", LayerShape(4, 2, 32, 32, 20), {"residual": 0}),
    ("tq3", PLAIN, {}),
    ("q8_0", PLAIN, {"transform_k": "lowrank:17", "transform_v": "lowrank:24"}),
    ("f16", PLAIN, {"transform_v": "lowrank:30"}),
    ("nuq3", PLAIN, {}),
    ("nuq3:outliers=1%", PLAIN, {}),
]


@pytest.mark.parametrize(("name", "shape", "how"), CASES)
def test_errors_are_those_of_the_cache(name, shape, how):
    cache, chunk = CacheConfig(**how), inputs(shape)
    watch = watched([candidate(name, shape, cache)], shape, [chunk], sinks=cache.sinks)
    for i, part in enumerate(PARTS):
        found = watch.errors(0, i)[0]
        truth = expected(name, shape, chunk, cache, ROPE, part)
        np.testing.assert_allclose(found, truth, atol=ORDER, rtol=1e-3)


def test_without_rope_and_over_several_chunks():
    chunks = [inputs(PLAIN, seed=seed) for seed in (1, 2)]
    watch = watched([candidate("q4_0", PLAIN)], PLAIN, chunks, rope=None)
    exact = CacheConfig(type_k="f32", type_v="f32")
    wrong, right = np.zeros(2), np.zeros(2)
    for chunk in chunks:
        o = through_the_cache(PLAIN, exact, chunk, None).reshape(-1, 2, 64)
        cache = CacheConfig(type_k="q4_0", type_v="q4_0")
        other = through_the_cache(PLAIN, cache, chunk, None).reshape(-1, 2, 64)
        wrong += ((other - o) ** 2).sum((0, 2))
        right += (o**2).sum((0, 2))
    np.testing.assert_allclose(
        watch.errors(0, PARTS.index("both"))[0], np.sqrt(wrong / right), atol=ORDER
    )


def test_f32_has_no_error():
    watch = watched([candidate("f32", PLAIN)], PLAIN, [inputs(PLAIN)])
    for part in range(len(PARTS)):
        assert watch.errors(0, part)[0].tolist() == [0, 0]


@pytest.mark.parametrize("parts", [[100], [60, 200, 240], [250]])
def test_parts_of_a_chunk_are_the_same_as_the_chunk(parts):
    tried = [candidate(name, PLAIN) for name in ("q8_0", "kivi2")]
    whole = watched(tried, PLAIN, [inputs(PLAIN)])
    cut = watched(tried, PLAIN, [inputs(PLAIN)], parts=parts, threads=1)
    for i in range(2):
        assert [e[0].tolist() for e in (whole.errors(i, p) for p in range(3))] == [
            e[0].tolist() for e in (cut.errors(i, p) for p in range(3))
        ]


def test_types_in_small_groups_have_the_same_errors(monkeypatch):
    tried = [candidate(name, PLAIN) for name in ("q8_0", "q4_0", "f16")]
    together = watched(tried, PLAIN, [inputs(PLAIN)])
    monkeypatch.setattr(kv_errors, "HELD_BYTES", 1)
    alone = watched(tried, PLAIN, [inputs(PLAIN)])
    for i in range(3):
        np.testing.assert_allclose(alone.errors(i, 2)[0], together.errors(i, 2)[0], rtol=1e-6)


def test_values_that_are_nothing_have_no_error():
    q, k, v = inputs(PLAIN)
    v[:, 1] = 0
    watch = watched([candidate("q4_0", PLAIN)], PLAIN, [(q, k, v)])
    found = watch.errors(0, PARTS.index("both"))[0]
    assert found[0] > 0.01
    assert found[1] == 0


def as_stored(k, unturned):
    """Keys as the cache stores them, sinks apart, f64 [N - 4, G, D]."""
    # a pair of channels i and i + 8 as a complex number, turned by its angle; the rest stays
    pairs = k[..., :8] + 1j * k[..., 8:16]
    if not unturned:
        pairs = pairs * np.exp(1j * np.arange(N)[:, None] * ROPE.inv_freq)[:, None]
    return np.concatenate([pairs.real, pairs.imag, k[..., 16:]], -1)[4:]


@pytest.mark.parametrize("unturned", [False, True])
def test_the_largest_keys(unturned):
    q, k, v = inputs(PLAIN)
    k[2, 1, 5] = 1e6  # a sink
    watch = watched([candidate("f16", PLAIN)], PLAIN, [(q, k, v)], unturned=unturned)
    expected = np.abs(as_stored(k, unturned)).max(0)
    np.testing.assert_allclose(watch.magnitudes[0], expected, rtol=1e-5)


@pytest.mark.parametrize("unturned", [False, True])
def test_spectra_of_keys_and_values_over_several_chunks(unturned):
    shape = LayerShape(6, 2, 40, 24)
    chunks = [inputs(shape, seed=seed) for seed in (1, 2)]
    for _, k, v in chunks:
        k[2], v[3] = 1e4, 1e4  # sinks
    watch = watched([candidate("f16", shape)], shape, chunks, parts=[100], unturned=unturned)
    keys = np.concatenate([as_stored(k, unturned) for _, k, _ in chunks])
    values = np.concatenate([v[4:] for _, _, v in chunks])
    for found, x in zip(watch.spectra()[0], (keys, values), strict=True):
        for g in range(2):
            singular = np.linalg.svd(x[:, g], compute_uv=False)
            np.testing.assert_allclose(found.singular[g], singular, rtol=1e-5)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_name_their_layer(which, bad):
    chunk = inputs(PLAIN)
    chunk[which][280, 1, 1] = bad
    with pytest.raises(NumericsError, match="layer 0: queries, keys or values hold NaN"):
        watched([candidate("f16", PLAIN)], PLAIN, [chunk])


def test_progress_counts_layers_of_all_chunks():
    told = []
    with ThreadPoolExecutor(1) as pool:
        watch = Watch(
            [PLAIN], [candidate("f16", PLAIN)], 4, N, 2, False, pool,
            lambda *args: told.append(args[:2]),
        )  # fmt: skip
        for _ in range(2):
            watch(0, *inputs(PLAIN), ROPE, SCALE)
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize(("name", "bits"), [("q4_0", 4.5), ("q8_0", 8.5), ("f16", 16)])
def test_bits_are_the_mean_of_all_values(name, bits):
    # values of 40 channels are padded to 64; two heads of 32 count twice as much as one
    def of(shapes, **how):
        cache = CacheConfig(type_k=name, type_v=name, **how)
        tried = Candidate(name, layout.layouts_of(cache, shapes), [])
        return [tried.bits(shapes, side) for side in ("key", "value")]

    one, two = LayerShape(1, 1, 32, 32), LayerShape(2, 2, 32, 32)
    assert of([one, two]) == [bits, bits]
    padded = find(name).bits_per_value(40, "value")
    assert of([LayerShape(1, 1, 32, 40), two])[1] == pytest.approx((40 * padded + 64 * bits) / 104)
    # half of the channels, and a page is as large as it was made for
    assert of([one], transform_k="lowrank:16")[0] == find(name).bits_per_value(16, "key") / 2
