"""The gemma3 graph against transformers' Gemma3ForCausalLM on the same dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.config import CacheConfig
from pykv.errors import GGUFError

# As in test_llama.py, with up to eight layers for its two; the q and k norms keep scores below 10.
TOLERANCE = 5e-4
N = 140  # tokens: many windows, and past two pages of the cache
WINDOW = 16
KEYS = {
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.sliding_window": WINDOW,
    "rope.freq_base": 1000000.0,
    "block_count": 7,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def settings(kinds, *, local=10000.0, base=1e6, factor=None, **more):
    """transformers' words for the layers' kinds and their ropes."""
    full = {"rope_type": "default", "rope_theta": base}
    if factor:
        full |= {"rope_type": "linear", "factor": factor}
    ropes = {GLOBAL: full, LOCAL: {"rope_type": "default", "rope_theta": local}}
    options = {"query_pre_attn_scalar": 32, "sliding_window": WINDOW}
    return options | {"layer_types": kinds, "rope_parameters": ropes} | more


def check(made, load, twin, ids, **twin_settings):
    expected = twin("gemma3", made.keys, made.weights, ids, **twin_settings)
    assert expected.std() > 0.3
    for backend in ("reference", "cpu"):
        error = np.abs(load(made.path, backend).logits(ids) - expected).max()
        assert error < TOLERANCE, (backend, error)
    return expected


def kinds_of(flags):
    return [LOCAL if flag else GLOBAL for flag in flags]


SIXTH = [True] * 5 + [False, True]


def test_every_sixth_layer_is_global(make, load, twin, tokens):
    made, ids = make("gemma3", KEYS), tokens(N)
    expected = check(made, load, twin, ids, **settings(kinds_of(SIXTH)))
    # other windows, bases or kinds of layers would be seen
    for other in (
        settings(kinds_of(SIXTH), sliding_window=WINDOW + 1),
        settings(kinds_of(SIXTH), local=1e6),
        settings(kinds_of(SIXTH), base=1e4),
        settings(kinds_of([True] * 7)),
        settings(kinds_of(SIXTH), query_pre_attn_scalar=16),
    ):
        wrong = twin("gemma3", made.keys, made.weights, ids, **other)
        assert np.abs(wrong - expected).max() > 20 * TOLERANCE


def test_both_rope_bases_and_a_scale_for_global_layers_only(make, load, twin, tokens):
    keys = KEYS | {
        "rope.freq_base_swa": 500.0,
        "rope.freq_base": 40000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    made, ids = make("gemma3", keys, types="Q8_0"), tokens(N)
    both = {"local": 500.0, "base": 40000.0}
    expected = check(made, load, twin, ids, **settings(kinds_of(SIXTH), factor=8.0, **both))
    unscaled = twin("gemma3", made.keys, made.weights, ids, **settings(kinds_of(SIXTH), **both))
    assert np.abs(unscaled - expected).max() > 20 * TOLERANCE


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        (3, [True, True, False, True]),
        (2, [True, False, True, False]),
        (1, [False] * 4),
        (0, [True] * 4),
        ([True, False, False, True], [True, False, False, True]),
        ([1, 1, 1, 1], [True] * 4),
        ([0, 1, 0, 0], [False, True, False, False]),
    ],
)
def test_pattern_of_windows(pattern, flags, make, load, twin, tokens):
    keys = KEYS | {"block_count": 4, "attention.sliding_window_pattern": pattern}
    made = make("gemma3", keys)
    check(made, load, twin, tokens(N), **settings(kinds_of(flags)))
    shapes = load(made.path).graph.shapes
    assert [s.window for s in shapes] == [WINDOW if flag else 0 for flag in flags]


@pytest.mark.parametrize("window", [None, 0])
def test_no_window(window, make, load, twin, tokens):
    made = make("gemma3", KEYS | {"attention.sliding_window": window})
    check(made, load, twin, tokens(N), **settings([GLOBAL] * 7))


@pytest.mark.parametrize("bad", [-1, [True, False], "every other"])
def test_a_pattern_that_makes_no_sense(bad, make, load):
    made = make("gemma3", KEYS | {"attention.sliding_window_pattern": bad})
    with pytest.raises(GGUFError, match=r"gemma3\.attention\.sliding_window_pattern"):
        load(made.path)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_heads(heads, make, load, twin, tokens):
    keys = KEYS | {"attention.head_count": heads[0], "attention.head_count_kv": heads[1]}
    keys |= {"embedding_length": 16 * heads[0], "block_count": 3}
    check(make("gemma3", keys), load, twin, tokens(N), **settings([LOCAL] * 3))


def test_an_output_matrix_of_its_own(make, load, twin, tokens):
    made = make("gemma3", KEYS, tied=False)
    check(made, load, twin, tokens(N), tied=False, **settings(kinds_of(SIXTH)))


def test_final_softcap(make, load, twin, tokens):
    made, ids = make("gemma3", KEYS | {"final_logit_softcapping": 1.5}), tokens(N)
    capped = check(made, load, twin, ids, **settings(kinds_of(SIXTH), final_logit_softcapping=1.5))
    assert 1.4 < np.abs(capped).max() < 1.5


@pytest.mark.parametrize("layers", [61, 62])
def test_query_scale_of_62_layers(layers, make, load, twin, tokens):
    keys = KEYS | {"block_count": layers, "feed_forward_length": 32}
    made = make("gemma3", keys)
    # heads of 32, of which the embedding's share is 64 / 4 = 16
    scalar = 16 if layers == 62 else 32
    graph = load(made.path).graph
    assert graph.scale == scalar**-0.5
    flags = [i % 6 < 5 for i in range(layers)]
    ids = tokens(24)
    expected = twin(
        "gemma3", made.keys, made.weights, ids,
        **settings(kinds_of(flags), query_pre_attn_scalar=scalar),
    )  # fmt: skip
    # nine times the layers of the other tests
    assert np.abs(load(made.path).logits(ids) - expected).max() < 9 * TOLERANCE


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("chunk", [None, 1, 13])
def test_a_query_sees_exactly_the_window(backend, chunk, make, load, tokens):
    """One local layer: the last token depends on itself and the WINDOW - 1 tokens before it."""
    keys = KEYS | {"block_count": 1, "attention.sliding_window_pattern": [True]}
    runner, ids = load(make("gemma3", keys).path, backend), tokens(100)
    last = runner.logits(ids, chunk)[-1]
    for back in (WINDOW, WINDOW + 1, 50, 99):
        changed = ids.copy()
        changed[-1 - back] = (changed[-1 - back] + 7) % 288
        np.testing.assert_array_equal(runner.logits(changed, chunk)[-1], last)
    for back in (0, 1, WINDOW - 2, WINDOW - 1):
        changed = ids.copy()
        changed[-1 - back] = (changed[-1 - back] + 7) % 288
        assert np.abs(runner.logits(changed, chunk)[-1] - last).max() > 1e-3


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_pages_behind_the_window_are_given_back(backend, make, load, tokens):
    keys = KEYS | {"block_count": 1, "attention.sliding_window_pattern": [True]}
    runner = load(make("gemma3", keys).path, backend)
    sequence = runner.store.new_sequence()
    sizes = []
    for ids in np.split(tokens(640), 10):
        step = runner.store.begin([(sequence, ids.astype(np.int32))], np.array([63], np.int32))
        assert np.isfinite(runner.dev.run(runner.graph, step)).all()
        runner.store.commit()
        sizes.append(runner.store.nbytes)
    assert max(sizes[1:]) == sizes[1]


@pytest.mark.parametrize("key", ["rope.freq_base", "rope.freq_base_swa"])
@pytest.mark.parametrize("base", [0.0, -5.0, 1.0])
def test_a_base_out_of_range(key, base, make, load):
    with pytest.raises(GGUFError, match=rf"gemma3\.{key} is {base}, not above 1"):
        load(make("gemma3", KEYS | {key: base}).path)


@pytest.mark.parametrize("name", ["attn_q_norm", "post_ffw_norm", "post_attention_norm"])
def test_a_norm_is_missing(name, make, load):
    made = make("gemma3", KEYS, drop=[f"blk.3.{name}.weight"])
    with pytest.raises(GGUFError, match=rf"blk\.3\.{name}\.weight.* is missing"):
        load(made.path)


def real_settings():
    kinds = kinds_of([i % 6 < 5 for i in range(18)])
    return settings(kinds, query_pre_attn_scalar=256, sliding_window=512)


@pytest.fixture(scope="module")
def gemma(gemma_path, real):
    return real(gemma_path, 64, **real_settings())


@pytest.mark.models
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gemma_3_270m(backend, gemma, load):
    # as for SmolLM2 in test_llama.py: sqrt(2048) * 2^-24 * sqrt(18 * 7) of logits up to 36, twice
    error = np.abs(load(gemma.path, backend).logits(gemma.ids) - gemma.logits).max()
    assert error < 2e-3


@pytest.mark.models
def test_gemma_3_270m_with_the_default_cache(gemma, load, divergence):
    ours = load(gemma.path, "cpu", CacheConfig()).logits(gemma.ids)
    assert 0 <= divergence(gemma.logits, ours) < 2e-6


@pytest.mark.models
@pytest.mark.slow
def test_gemma_3_270m_on_a_longer_text(gemma_path, real, load, divergence):
    case = real(gemma_path, 256, **real_settings())
    for backend in ("cpu", "reference"):
        error = np.abs(load(case.path, backend).logits(case.ids) - case.logits).max()
        assert error < 2e-3, backend
    ours = load(case.path, "cpu", CacheConfig()).logits(case.ids)
    assert 0 <= divergence(case.logits, ours) < 2e-6
