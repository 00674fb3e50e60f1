"""The llama graph against transformers' LlamaForCausalLM on the same dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.config import CacheConfig
from pykv.errors import GGUFError, UnsupportedError

BACKENDS = ["reference", "cpu"]

# Logits are of order 1 (the largest near 5), made of two layers' float32 sums of 64 to 160 terms.
# A sum errs by about sqrt(160) * 2^-24 = 8e-7 of its terms; transformers also rounds each angle
# to float32, 160 * 2^-24 = 1e-5 rad at the last position. Scores reach 15 in these models, and
# e^x passes their errors on, 15 * 1e-5 = 1.5e-4, to the few tokens that it is largest for.
TOLERANCE = 3e-4
N = 160  # tokens: past two pages of the cache, and enough for slow pairs to turn

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def check(made, load, twin, ids, backends=BACKENDS, **settings):
    """Both backends against transformers; returns its logits."""
    expected = twin(made.arch, made.keys, made.weights, ids, **settings)
    assert expected.std() > 0.3
    for backend in backends:
        error = np.abs(load(made.path, backend).logits(ids) - expected).max()
        assert error < TOLERANCE, (backend, error)
    return expected


@pytest.mark.parametrize(
    ("heads", "kv"), [(4, None), (4, 4), (6, 2), (7, 1)], ids=["default", "mha", "3to1", "7to1"]
)
def test_heads(heads, kv, make, load, twin, tokens):
    keys = {"attention.head_count": heads, "embedding_length": heads * 16}
    if kv:
        keys["attention.head_count_kv"] = kv
    check(make("llama", keys), load, twin, tokens(N))


@pytest.mark.parametrize("d", [8, 24, 32, 80])
def test_heads_of_another_size_than_the_embedding_s_share(d, make, load, twin, tokens):
    keys = {"attention.key_length": d, "attention.value_length": d, "rope.dimension_count": d}
    check(make("llama", keys | {"attention.head_count_kv": 2}), load, twin, tokens(N))


def test_an_output_matrix_of_its_own(make, load, twin, tokens):
    made, ids = make("llama", tied=False), tokens(N)
    expected = check(made, load, twin, ids, tied=False)
    # the same weights but the output's: had it been ignored, this would have come out
    del made.weights["output.weight"]
    assert np.abs(twin("llama", made.keys, made.weights, ids) - expected).max() > 1


QKVO = ("attn_q", "attn_k", "attn_v", "attn_output")


def test_biases_of_the_attention(make, load, twin, tokens):
    made, ids = make("llama", {"attention.head_count_kv": 2}, biases=QKVO), tokens(N)
    check(made, load, twin, ids, attention_bias=True)


def test_biases_of_the_feed_forward_layer(make, load, twin, tokens):
    made = make("llama", biases=("ffn_gate", "ffn_up", "ffn_down"))
    check(made, load, twin, tokens(N), mlp_bias=True)


def test_fused_qkv(make, load, twin, tokens):
    keys = {"attention.head_count_kv": 2}
    check(make("llama", keys, fused=True), load, twin, tokens(N))
    check(make("llama", keys, fused=True, types="Q8_0"), load, twin, tokens(N))


def test_fused_qkv_with_biases_apart_or_fused(make, load, twin, tokens):
    zeros = {f"blk.{i}.attn_output.bias": np.zeros(64, np.float32) for i in range(2)}
    keys = {"attention.head_count_kv": 1}
    options = {"fused": True, "extra": zeros}
    apart = make("llama", keys, biases=QKVO, **options)
    check(apart, load, twin, tokens(N), attention_bias=True)
    check(make("llama", keys, fused_bias=True, **options), load, twin, tokens(N),
          attention_bias=True)  # fmt: skip


@pytest.mark.parametrize("types", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weight_types(types, make, load, twin, tokens):
    check(make("llama", types=types), load, twin, tokens(70))


def test_types_mixed_as_files_mix_them(make, load, twin, tokens):
    types = {"token_embd": "Q8_0", "attn_v": "Q5_0", "ffn_down": "F16", "blk": "Q4_0"}
    made = make("llama", {"attention.head_count_kv": 2}, types=types)
    check(made, load, twin, tokens(70))


def rope_case(make, load, twin, ids, keys, parameters, extra=None, context=None):
    """The scaling against transformers, and that without it something else comes out."""
    base = {"attention.key_length": 32, "attention.value_length": 32, "block_count": 3}
    base |= {"context_length": context} if context else {}
    made = make("llama", base | keys, extra=extra)
    parameters = {"rope_theta": keys.get("rope.freq_base", 10000.0)} | parameters
    expected = check(made, load, twin, ids, rope_parameters=parameters)
    plain = make("llama", base)
    unscaled = load(plain.path).logits(ids)
    assert np.abs(unscaled - expected).max() > 100 * TOLERANCE
    return made


@pytest.mark.parametrize("base", [100.0, 130000.0, 1e6])
def test_rope_base(base, make, load, twin, tokens):
    rope_case(make, load, twin, tokens(N), {"rope.freq_base": base}, {"rope_type": "default"})


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling(keys, make, load, twin, tokens):
    rope_case(make, load, twin, tokens(N), keys, {"rope_type": "linear", "factor": 4.0})


@pytest.mark.parametrize("keys", [{"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
                                  {"rope.scaling.type": "linear"},
                                  {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0},
                                  {"rope.scaling.type": "yarn"}])  # fmt: skip
def test_no_scaling_without_a_factor(keys, make, load, twin, tokens):
    check(make("llama", keys), load, twin, tokens(N), backends=["reference"])


@pytest.mark.parametrize(
    ("original", "factor", "base"),
    [(64, 4.0, 10000.0), (512, 8.0, 10000.0), (4096, 32.0, 150000.0), (16, 4.0, 10000.0)],
)
def test_yarn(original, factor, base, make, load, twin, tokens):
    keys = {
        "rope.freq_base": base,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
    }
    parameters = {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
    }  # fmt: skip
    context = int(original * factor)
    made = rope_case(make, load, twin, tokens(N), keys, parameters, context=context)
    rope = load(made.path).graph.rope
    assert rope.magnitude == pytest.approx(1 + 0.1 * np.log(factor))


def test_yarn_without_an_original_context_takes_the_model_s(make, load):
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 64}
    implied = load(make("llama", keys).path).graph.rope
    keys["rope.scaling.original_context_length"] = 64
    explicit = load(make("llama", keys | {"context_length": 256}).path).graph.rope
    np.testing.assert_array_equal(implied.inv_freq, explicit.inv_freq)


def test_yarn_beta_keys_are_not_for_this_architecture(make, load):
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    plain = load(make("llama", keys).path).graph.rope
    betas = {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}
    np.testing.assert_array_equal(
        load(make("llama", keys | betas).path).graph.rope.inv_freq, plain.inv_freq
    )


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_the_attention_factor_multiplies_cos_and_sin(kind, make, load):
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    plain = load(make("llama", keys).path).graph.rope.magnitude
    keys["rope.scaling.attn_factor"] = 1.25
    assert load(make("llama", keys).path).graph.rope.magnitude == 1.25 * plain
    assert plain == pytest.approx(1 + 0.1 * np.log(4) if kind == "yarn" else 1)


def test_yarn_never_shrinks_the_magnitude(make, load):
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5}
    assert load(make("llama", keys).path).graph.rope.magnitude == 1


def llama3_factors(d, base, original):
    """Divisors of the angles: 1 for short waves, the factor for long ones, between them smooth.

    Derived from the rule in words: a pair that makes t turns in the original context is kept for
    t > 4, slowed 8 times for t < 1, and in between 1 / divisor goes linearly with t from 1/8 to 1.
    """
    turns = original * base ** (-2 * np.arange(d // 2) / d) / (2 * np.pi)
    mix = np.clip((turns - 1) / (4 - 1), 0, 1)
    return (1 / ((1 - mix) / 8 + mix)).astype(np.float32)


@pytest.mark.parametrize(("base", "original"), [(10000.0, 64), (500000.0, 8192), (10000.0, 256)])
def test_llama_3_1_rope_factors(base, original, make, load, twin, tokens):
    factors = llama3_factors(32, base, original)
    assert {1.0, 8.0} < set(factors.tolist())
    keys = {"rope.freq_base": base}
    parameters = {"rope_type": "llama3", "original_max_position_embeddings": original, **LLAMA3}
    extra = {"rope_freqs.weight": factors}
    rope_case(make, load, twin, tokens(N), keys, parameters, extra, context=8 * original)


def test_half_a_head_is_not_turned_in_this_architecture(make, load):
    made = make("llama", {"rope.dimension_count": 8})
    with pytest.raises(GGUFError, match=r"llama\.rope\.dimension_count is 8, expected 16"):
        load(made.path)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan])
def test_rope_factors_out_of_range(bad, make, load):
    factors = np.ones(8, np.float32)
    factors[3] = bad
    made = make("llama", extra={"rope_freqs.weight": factors})
    with pytest.raises(GGUFError, match=r"rope_freqs\.weight holds factors that are not above 0"):
        load(made.path)


def test_rope_factors_of_another_length(make, load):
    made = make("llama", extra={"rope_freqs.weight": np.ones(9, np.float32)})
    with pytest.raises(GGUFError, match=r"rope_freqs\.weight.* has shape \[9\], expected \[8\]"):
        load(made.path)


def test_long_and_short_factors_are_refused(make, load):
    ones = np.ones(8, np.float32)
    extra = {"rope_factors_long.weight": ones, "rope_factors_short.weight": ones}
    with pytest.raises(UnsupportedError, match=r"rope_factors_long\.weight, rope_factors_short"):
        load(make("llama", extra=extra).path)


def test_experts_are_refused(make, load):
    with pytest.raises(UnsupportedError, match="experts are not supported"):
        load(make("llama", {"expert_count": 8}).path)


def test_a_sliding_window_key_is_ignored(make, load, twin, tokens):
    made = make("llama", {"attention.sliding_window": 16})
    check(made, load, twin, tokens(N), backends=["reference"])


def test_heads_may_be_listed_by_layer(make, load, tokens):
    shared = make("llama", {"attention.head_count_kv": 2})
    keys = {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2]}
    listed, ids = make("llama", keys), tokens(20)
    np.testing.assert_array_equal(load(listed.path).logits(ids), load(shared.path).logits(ids))


def test_without_a_count_of_kv_heads_each_layer_has_one_per_head(make, load):
    made = make("llama", {"attention.head_count": [4, 4]})
    assert [s.n_kv for s in load(made.path).graph.shapes] == [4, 4]


REAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}


@pytest.fixture(scope="module")
def smollm2(smollm2_path, real):
    return real(smollm2_path, 96, **REAL)


@pytest.mark.models
@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2(backend, smollm2, load):
    # sums of up to 1536 terms err by sqrt(1536) * 2^-24 = 2.3e-6 of themselves; those of 30 layers'
    # 7 products add up to sqrt(210) times that, 3.4e-5, of logits up to 30; two float32 programs
    error = np.abs(load(smollm2.path, backend).logits(smollm2.ids) - smollm2.logits).max()
    assert error < 2e-3


@pytest.mark.models
def test_smollm2_with_the_default_cache(smollm2, load, divergence):
    ours = load(smollm2.path, "cpu", CacheConfig()).logits(smollm2.ids)
    # f16 keeps values to 2^-11 of themselves, over many channels and tokens; logits up to 30 then
    # move by about 30 * 2^-11 / sqrt(64) = 2e-3, and KL is half of that squared
    assert 0 <= divergence(smollm2.logits, ours) < 2e-6


@pytest.mark.models
@pytest.mark.slow
def test_smollm2_on_a_longer_text(smollm2_path, real, load, divergence):
    case = real(smollm2_path, 256, **REAL)
    for backend in BACKENDS:
        error = np.abs(load(case.path, backend).logits(case.ids) - case.logits).max()
        assert error < 2e-3, backend
    ours = load(case.path, "cpu", CacheConfig()).logits(case.ids)
    assert 0 <= divergence(case.logits, ours) < 2e-6
