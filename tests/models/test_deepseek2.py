"""The deepseek2 graph against transformers' DeepseekV2ForCausalLM on the dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.config import CacheConfig
from pykv.errors import ConfigError, GGUFError, UnsupportedError

# as in test_llama.py, whose sums are as long
TOLERANCE = 3e-4
N = 160
E, HEADS, FF = 64, 4, 96
RANK, TURN, PLAIN, VALUE, Q_RANK = 64, 16, 32, 24, 48
KEYS = {
    "attention.head_count_kv": 1,
    "attention.key_length": RANK + TURN,
    "attention.value_length": RANK,
    "attention.key_length_mla": PLAIN + TURN,
    "attention.value_length_mla": VALUE,
    "attention.kv_lora_rank": RANK,
    "rope.dimension_count": TURN,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64,
    "context_length": 512,
}


def tensors(q_rank=0, heads=HEADS, rank=RANK, turn=TURN):
    out = {}
    for i in range(2):
        queries = heads * (PLAIN + turn)
        parts = {
            "attn_kv_a_mqa": (rank + turn, E),
            "attn_kv_a_norm": (rank,),
            "attn_k_b": (heads, rank, PLAIN),
            "attn_v_b": (heads, VALUE, rank),
            "attn_output": (E, heads * VALUE),
        }
        if q_rank:
            parts |= {"attn_q_a": (q_rank, E), "attn_q_a_norm": (q_rank,)}
            parts["attn_q_b"] = (queries, q_rank)
        else:
            parts["attn_q"] = (queries, E)
        out |= {f"blk.{i}.{name}.weight": shape for name, shape in parts.items()}
    return out


@pytest.fixture
def deepseek(make):
    """deepseek(keys={}, q_rank=0, **make's) -> Made."""

    def build(keys=None, q_rank=0, drop=(), reshape=None, **options):
        keys = KEYS | ({"attention.q_lora_rank": q_rank} if q_rank else {}) | (keys or {})
        heads = keys.get("attention.head_count", HEADS)
        gone = {f"blk.{i}.attn_{part}.weight" for i in range(2) for part in "qkv"}
        shapes = tensors(q_rank, heads) | (reshape or {})
        shapes = {name: shape for name, shape in shapes.items() if name not in drop}
        return make("deepseek2", keys, plain=True, drop=gone | set(drop), reshape=shapes, **options)

    return build


NAMES = {
    "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def state_of(weights):
    """The weights under transformers' names; both matrices out of the latent as one."""
    import torch

    state = {}
    for name, x in weights.items():
        stem = name.removesuffix(".weight")
        part = stem.split(".")[-1]
        if part == "attn_v_b":
            continue
        if part == "attn_k_b":
            values = weights[name.replace("attn_k_b", "attn_v_b")]
            x = np.concatenate([x.transpose(0, 2, 1), values], axis=1).reshape(-1, x.shape[1])
            part = "self_attn.kv_b_proj"
        else:
            part = NAMES.get(part, part)
        stem = f"model.layers.{stem.split('.')[1]}.{part}" if "blk." in stem else TOP[stem]
        state[f"{stem}.weight"] = torch.from_numpy(np.require(x, np.float32, "CW"))
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state


def twin(made, ids, **settings):
    """Logits of transformers' model, f32 [T, V]."""
    import torch
    import transformers as hf

    keys = made.keys
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} | settings
    config = hf.DeepseekV2Config(
        vocab_size=made.weights["token_embd.weight"].shape[0],
        hidden_size=E,
        intermediate_size=FF,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=keys["attention.head_count"],
        num_key_value_heads=keys["attention.head_count"],
        q_lora_rank=keys.get("attention.q_lora_rank"),
        kv_lora_rank=RANK,
        qk_rope_head_dim=TURN,
        qk_nope_head_dim=PLAIN,
        v_head_dim=VALUE,
        rms_norm_eps=keys["attention.layer_norm_rms_epsilon"],
        max_position_embeddings=keys["context_length"],
        tie_word_embeddings="output.weight" not in made.weights,
        attn_implementation="eager",
        **settings,
    )
    with torch.device("meta"):
        model = hf.DeepseekV2ForCausalLM(config)
    model.load_state_dict(state_of(made.weights), assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with torch.no_grad():
        out = model.eval()(torch.as_tensor(np.asarray(ids, np.int64))[None], use_cache=False)
    return out.logits[0].numpy()


def check(made, load, ids, backends=("reference", "cpu"), **settings):
    """Both backends against transformers; returns its logits."""
    expected = twin(made, ids, **settings)
    assert expected.std() > 0.3
    for backend in backends:
        error = np.abs(load(made.path, backend).logits(ids) - expected).max()
        assert error < TOLERANCE, (backend, error)
    return expected


@pytest.mark.parametrize("q_rank", [0, Q_RANK])
def test_queries_with_and_without_a_latent(q_rank, deepseek, load, tokens):
    made = deepseek(q_rank=q_rank)
    expected = check(made, load, tokens(N))
    # one token at a time, by the row kernel
    rows = load(made.path, "cpu").logits(tokens(N)[:70], chunk=1)
    assert np.abs(rows - expected[:70]).max() < TOLERANCE


@pytest.mark.parametrize("heads", [1, 2, 64])
def test_heads(heads, deepseek, load, tokens):
    check(deepseek({"attention.head_count": heads}), load, tokens(70), ["cpu"])


@pytest.mark.parametrize("types", ["F16", "Q8_0"])
def test_weight_types(types, deepseek, load, tokens):
    check(deepseek(types=types), load, tokens(70))


@pytest.mark.parametrize("all_dim", [0.0, 0.707, 1.0])
def test_yarn(all_dim, deepseek, load, tokens):
    """`yarn_log_multiplier` is a tenth of mscale_all_dim; without it cos and sin grow instead."""
    keys, more = dict(YARN), {}
    if all_dim:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * all_dim
        more = {"mscale": all_dim, "mscale_all_dim": all_dim}
    parameters = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
        "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1, **more,
    }  # fmt: skip
    made = deepseek(keys)
    check(made, load, tokens(N), ["reference"], rope_parameters=parameters)
    graph = load(made.path).graph
    growth = np.log(8)
    assert graph.scale == pytest.approx((1 + 0.1 * all_dim * growth) ** 2 / np.sqrt(PLAIN + TURN))
    assert graph.rope.magnitude == pytest.approx(1 if all_dim else 1 + 0.1 * growth)


def test_the_cache_holds_576_values_a_token(deepseek, load, tokens):
    """Of DeepSeek's widths, here 80: keys only, and no more for 33 heads than for one."""
    made = deepseek()
    for type_, bits in (("f32", 32), ("f16", 16), ("q8_0", 8.5), ("q4_0", 4.5)):
        cache = CacheConfig(type_, type_, sinks=0, residual=0, transform_k="none")
        store = load(made.path, cache=cache).store
        sequence, n = store.new_sequence(), 256
        store.begin([(sequence, np.zeros(n, np.int32))], np.zeros(1, np.int32))
        store.commit()
        tables = sum(held.tables.nbytes for held in store._sequences.values())
        # a block of 32 that is filled by half costs its whole scales
        extra = 2 * n * 0.5 * 2 if type_.startswith("q") else 0
        assert store.nbytes - tables == 2 * n * (RANK + TURN) * bits / 8 + extra
        assert store.f16_nbytes == 2 * n * (RANK + TURN) * 2


EXPERTS = {"expert_count": 8, "leading_dense_block_count": 1}


@pytest.mark.parametrize(
    ("keys", "options", "error", "words"),
    [
        (EXPERTS, {}, UnsupportedError, "models with experts are not supported"),
        ({"attention.key_length_mla": None}, {}, UnsupportedError, "convert the model anew"),
        ({"attention.head_count_kv": 2}, {}, GGUFError, "describe no latent cache"),
        ({"attention.kv_lora_rank": 32}, {}, GGUFError, "describe no latent cache"),
        ({"rope.dimension_count": 8}, {}, GGUFError, "dimension_count is 8, expected 16"),
        (
            {},
            {"reshape": {"blk.0.attn_kv_b.weight": (HEADS * (PLAIN + VALUE), RANK)}},
            UnsupportedError,
            "attn_kv_b holds key and value weights in one matrix",
        ),
        ({}, {"drop": ["blk.1.attn_k_b.weight"]}, GGUFError, "attn_k_b"),
    ],
)
def test_what_is_refused(keys, options, error, words, deepseek, load):
    with pytest.raises(error, match=words):
        load(deepseek(keys, **options).path)


def test_experts_that_no_layer_has(deepseek, load, tokens):
    made = deepseek({"expert_count": 8, "leading_dense_block_count": 2})
    check(made, load, tokens(20), ["reference"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CacheConfig("q8_0", "f16"), "cache type f16 for values must be q8_0"),
        (CacheConfig(override="1=k:q8_0"), "for values must be q8_0"),
        (CacheConfig("kivi4", "kivi4", position="read"), "--kv-position read"),
        (CacheConfig("nuq4", "nuq4"), "the nuq types do not work"),
        (CacheConfig("q4_0", "q4_0", transform_v="random"), "--kv-transform-v random must be"),
    ],
)
def test_settings_that_one_tensor_cannot_have(config, words, deepseek, load):
    with pytest.raises(ConfigError, match=words):
        load(deepseek().path, cache=config)
