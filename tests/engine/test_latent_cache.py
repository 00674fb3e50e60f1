"""A model whose values are a part of its keys, loaded as a user would: bytes, reports, refusals."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import small_model
from small_model import FF, TOKENS, E

from pykv.config import CacheConfig
from pykv.engine import inspect, kv_report
from pykv.engine.calibrate import calibrate
from pykv.errors import ConfigError

HEADS, RANK, TURN, PLAIN, VALUE = 4, 64, 16, 32, 24
TEXT = "The theory of an ancient anthem: the band and the hand, then another land. " * 40
KEYS = {
    "context_length": 512, "embedding_length": E, "block_count": 2, "feed_forward_length": FF,
    "attention.head_count": HEADS, "attention.head_count_kv": 1,
    "attention.key_length": RANK + TURN, "attention.value_length": RANK,
    "attention.key_length_mla": PLAIN + TURN, "attention.value_length_mla": VALUE,
    "attention.kv_lora_rank": RANK, "rope.dimension_count": TURN,
}  # fmt: skip


def tensors():
    out = {"token_embd.weight": (len(TOKENS), E), "output_norm.weight": (E,)}
    for i in range(2):
        layer = {
            "attn_norm": (E,), "ffn_norm": (E,), "attn_kv_a_norm": (RANK,),
            "attn_q": (HEADS * (PLAIN + TURN), E), "attn_kv_a_mqa": (RANK + TURN, E),
            "attn_k_b": (HEADS, RANK, PLAIN), "attn_v_b": (HEADS, VALUE, RANK),
            "attn_output": (E, HEADS * VALUE),
            "ffn_gate": (FF, E), "ffn_up": (FF, E), "ffn_down": (E, FF),
        }  # fmt: skip
        out |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return out


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("latent") / "latent.gguf", np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "deepseek2")
    for key, value in KEYS.items():
        writer.add_uint32(f"deepseek2.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(
        [1] * (len(TOKENS) - len(small_model.CONTROLS)) + [3] * len(small_model.CONTROLS)
    )
    writer.add_token_merges(list(small_model.MERGES.values()))
    writer.add_eos_token_id(small_model.ID["<|im_end|>"])
    for name, shape in tensors().items():
        x = rng.normal(0, 1, shape) / np.sqrt(shape[-1]) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(name, x.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_a_cache_of_keys_alone(file, load):
    model = load(file=file, cache=CacheConfig("q4_0", "q4_0", sinks=0, residual=0))
    assert model.plan[-1] == "attention: latent_q4_0_f16"
    session = model.session()
    session.read(model.ids(TEXT)[:320])
    tables = sum(held.tables.nbytes for held in model.store._sequences.values())
    pages = 2 * 320 * (RANK / 2 + RANK / 16 + TURN / 2 + 2)  # codes, and a scale for each 32
    assert model.store.nbytes - tables == pages
    assert model.store.f16_nbytes == 2 * 320 * (RANK + TURN) * 2
    assert model.store.estimate(320) >= pages


def test_types_and_their_differences(file, load):
    model = load(file=file, cache=CacheConfig("q4_0", "q4_0"))
    found = model.divergence(TEXT, ctx_size=256, chunks=1)
    assert 0 < found.kld.value < 0.05
    with pytest.raises(ConfigError, match="values are a part of its keys"):
        kv_report.measure(model, TEXT, ctx_size=256)


def test_what_a_file_s_header_tells(file):
    found = inspect.report(file)
    assert found["model"]["shared_values"]
    of_types = {row["type"]: row for row in found["cache"]}
    assert of_types["f16"]["bytes"] == of_types["f16"]["key_bytes"] == 2 * (RANK + TURN) * 2
    assert of_types["f16"]["value_bytes"] == 0
    # a scale of 16 bits for the latent, and one for the rest
    assert of_types["int8"]["bytes"] == 2 * (RANK + TURN + 2 * 2)
    assert of_types["int8"]["bits_per_value"] == pytest.approx(8 + 32 / (RANK + TURN))
    assert "nuq4" not in of_types


def test_calibration_measures_both_parts(file, load):
    model, keys = load(file=file), {}

    def listen(layer, q, k, v, rope, scale):
        np.testing.assert_array_equal(v, k[..., :RANK])
        keys.setdefault(layer, []).append(k)

    model.dev.listener = listen
    ids = model.tokenizer.encode(TEXT, add_special=False)
    model.logits(ids[:256])
    model.dev.listener = None
    scales, bases = calibrate(model, TEXT, ["fp8_e4m3", "lowrank"], ctx_size=256, chunks=1)
    for layer in range(2):
        k = np.concatenate(keys[layer])
        latent = np.abs(k[..., :RANK]).max() / 448
        np.testing.assert_allclose(scales.layers[layer]["v_scale"], latent, rtol=1e-5)
        # a turn keeps a pair's length
        turning = np.hypot(*np.split(k[..., RANK:].reshape(-1, 2), 2, 1)).max() / 448
        assert 0.5 * turning < scales.layers[layer]["k_scale"][0] <= turning * (1 + 1e-5)
        assert bases.layers[layer]["v_basis"].shape == (1, RANK, RANK)
