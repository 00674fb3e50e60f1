"""Models whose keys a coarse cache type would spoil: found by their weights, and kept from harm."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from pykv.backends.base import LayerShape
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.engine import guard
from pykv.errors import ConfigError, NumericsError
from pykv.gguf import open_gguf
from pykv.registry import find

D, E, LAYERS, N_CTX = 64, 128, 3, 1024
BIASED = 1  # the layer whose keys are out of the ordinary
MODELS = Path(__file__).resolve().parents[3] / "dev" / "models"


def weights(small, group, n_kv, bias, outliers, seed):
    """Random layers, after which layer 1 is given a bias, or a pair of outlier channels.

    `bias`: its length over that of a typical key; it lies in the eight channels that RoPE turns
    least, as Qwen2's does. `outliers`: the factor of two key channels, taken back in the queries.
    """
    rng = np.random.default_rng(seed)

    def matrix(n_out, n_in, gain=1.0):
        return gain * rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)

    n = len(small.TOKENS)
    out = {"token_embd.weight": matrix(n, E, 8), "output_norm.weight": np.ones(E)}
    out["output.weight"] = matrix(n, E, 4)
    for i in range(LAYERS):
        layer = {
            "attn_norm": np.ones(E), "ffn_norm": np.ones(E),
            "attn_q": matrix(group * n_kv * D, E, 1.4), "attn_k": matrix(n_kv * D, E, 1.4),
            "attn_v": matrix(n_kv * D, E), "attn_output": matrix(E, group * n_kv * D),
            "ffn_gate": matrix(E, E), "ffn_up": matrix(E, E), "ffn_down": matrix(E, E),
        }  # fmt: skip
        if i == BIASED and outliers:
            layer["attn_k"].reshape(n_kv, D, E)[:, -2:] *= outliers
            layer["attn_q"].reshape(-1, D, E)[:, -2:] /= outliers
        out |= {f"blk.{i}.{name}.weight": x for name, x in layer.items()}
    if bias:
        values = np.zeros((n_kv, D))
        values[:, -8:] = rng.choice([-1, 1], (n_kv, 8)) * bias * 1.4 * np.sqrt(D / 8)
        out[f"blk.{BIASED}.attn_k.bias"] = values.reshape(-1)
    return out


def fuse(tensors):
    """The three projections of every layer in one matrix."""
    for i in range(LAYERS):
        parts = [tensors.pop(f"blk.{i}.attn_{x}.weight") for x in "qkv"]
        tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
        key = tensors.pop(f"blk.{i}.attn_k.bias", None)
        if key is not None:
            sides = [np.zeros(len(parts[0])), key, np.zeros(len(parts[2]))]
            tensors[f"blk.{i}.attn_qkv.bias"] = np.concatenate(sides)
    return tensors


@pytest.fixture(scope="module")
def file_of(small, tmp_path_factory):
    """file_of(group=, n_kv=, bias=, outliers=, fused=) -> a model file, written once."""
    folder, made = tmp_path_factory.mktemp("guard"), {}

    def get(group=1, n_kv=1, bias=0, outliers=0, fused=False, seed=3):
        key = (group, n_kv, bias, outliers, fused, seed)
        if key not in made:
            made[key] = folder / f"{len(made)}.gguf"
            tensors = weights(small, group, n_kv, bias, outliers, seed)
            _write(small, made[key], group, n_kv, fuse(tensors) if fused else tensors)
        return made[key]

    return get


def _write(small, path, group, n_kv, tensors):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(E)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(E)
    writer.add_head_count(group * n_kv)
    writer.add_head_count_kv(n_kv)
    writer.add_key_length(D)
    writer.add_value_length(D)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(small.TOKENS)
    writer.add_token_types([1] * (256 + len(small.MERGES)) + [3] * len(small.CONTROLS))
    writer.add_token_merges(list(small.MERGES.values()))
    writer.add_eos_token_id(small.ID["<|im_end|>"])
    for name, x in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(x, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def override_of(path, cache, group=1, n_kv=1, layers=LAYERS, d=D):
    """What the guard makes of a file: the override that the cache gets."""
    shapes = [LayerShape(group * n_kv, n_kv, d, d)] * layers
    with open_gguf(path) as file:
        return guard.guarded(cache, file, shapes).override


def divergence(load, file, ids, cache, device):
    """Mean KL divergence of a cache's predictions from an f16 cache's, in nats a token."""
    logs = []
    for config in (CacheConfig(), cache):
        model = load(file=file, cache=config, device=device)
        logits = model.logits(ids)[100:].astype(np.float64)
        top = logits.max(-1, keepdims=True)
        logs.append(logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)))
    base, other = logs
    return float((np.exp(base) * (base - other)).sum(-1).mean())


@pytest.mark.parametrize(("group", "device"), [(3, "cpu"), (7, "reference")])
def test_biased_keys_break_q4_0_and_the_guard_keeps_them_whole(
    load, file_of, caplog, group, device
):
    file, ids = file_of(group, bias=12), np.random.default_rng(group).integers(0, 256, 400).tolist()
    plain = file_of(group)
    off = divergence(load, file, ids, CacheConfig("q4_0", guard="off"), device)
    assert "--kv-guard on would keep q8_0 keys" in caplog.text
    on = divergence(load, file, ids, CacheConfig("q4_0"), device)
    ordinary = divergence(load, plain, ids, CacheConfig("q4_0"), device)
    # the measure is the same model without the bias, whose q4_0 keys do as they should; 1.1 nats a
    # token (0.4 in the other group) against 0.02 were measured
    assert on < 1.5 * ordinary < 0.1
    assert off > 10 * on


@pytest.mark.parametrize("type_k", ["q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "tq3", "tq4"])
@pytest.mark.parametrize("how", [{"bias": 20}, {"outliers": 200}])
def test_types_that_share_a_scale_among_channels_are_replaced(file_of, type_k, how):
    safe = override_of(file_of(**how), CacheConfig(type_k))
    assert safe == f"{BIASED}=k:{'f16' if 'outliers' in how else 'q8_0'}"
    assert override_of(file_of(), CacheConfig(type_k)) is None


@pytest.mark.parametrize("type_k", ["f32", "f16", "kivi2", "kivi4", "fp8_e4m3", "int8", "q8_0"])
@pytest.mark.parametrize("bias", [12, 20])
def test_types_that_do_not_mind_stay(file_of, type_k, bias):
    assert override_of(file_of(bias=bias), CacheConfig(type_k)) is None


def test_a_bias_too_large_for_q8_0_has_its_keys_kept_exact(file_of):
    for type_k in ("q4_0", "q8_0"):
        assert override_of(file_of(bias=100), CacheConfig(type_k)) == f"{BIASED}=k:f16"


@pytest.mark.parametrize("transform", ["none", "hadamard", "random"])
def test_no_transform_helps_and_each_is_judged(file_of, transform):
    cache = CacheConfig("q4_0", transform_k=transform)
    assert override_of(file_of(bias=12), cache) == f"{BIASED}=k:q8_0"
    assert override_of(file_of(), cache) is None


def test_a_fused_projection_is_judged_like_three(file_of):
    how = {"group": 2, "n_kv": 2, "bias": 12}
    for fused in (False, True):
        override = override_of(file_of(fused=fused, **how), CacheConfig("q4_0"), 2, 2)
        assert override == f"{BIASED}=k:q8_0"


def test_an_override_of_the_users_own_wins(file_of, caplog):
    file = file_of(bias=12)
    cache = CacheConfig("q4_0", override="1=k:q5_0")
    assert override_of(file, cache) == "1=k:q5_0"
    assert caplog.records == []
    # one that names only a value type says nothing about keys, and stays beside the guard's
    cache = CacheConfig("q4_0", override="0-2=v:q8_0")
    guarded = CacheConfig("q4_0", override=override_of(file, cache))
    formats = Store([LayerShape(1, 1, D, D)] * LAYERS, guarded, 100).formats
    assert [f.page_k for f in formats] == ["q4_0", "q8_0", "q4_0"]
    assert {f.page_v for f in formats} == {"q8_0"}


@pytest.mark.parametrize(
    ("setting", "said"), [("on", "q8_0 keys are kept there"), ("off", "would keep q8_0 keys there")]
)
def test_one_line_says_which_layers_and_what_happens(file_of, caplog, setting, said):
    override = override_of(file_of(bias=12), CacheConfig("q4_0", guard=setting))
    assert override == (f"{BIASED}=k:q8_0" if setting == "on" else None)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in (f"layer {BIASED}:", "q4_0", said, "--kv-guard"):
        assert part in record.getMessage()


def test_layers_are_listed_in_runs():
    assert guard._ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_the_setting_is_on_or_off():
    with pytest.raises(ConfigError, match="kv guard must be on or off, not 'maybe'"):
        CacheConfig(guard="maybe")


@pytest.mark.models
@pytest.mark.parametrize("transform", ["auto", "none"])
def test_the_real_models_are_not_flagged(smollm2_path, gemma_path, transform):
    for path, group, n_kv, layers, d in ((smollm2_path, 3, 3, 30, 64), (gemma_path, 4, 1, 18, 256)):
        for type_k in ("q4_0", "q4_1") if transform == "none" else ("q4_0", "tq3"):
            cache = CacheConfig(type_k, transform_k=transform)
            assert override_of(path, cache, group, n_kv, layers, d) is None


# the estimate


def test_predicted_channels_are_those_of_random_normed_inputs(file_of):
    """A projection of random vectors of the norm's kind, drawn here and multiplied out."""
    group, n_kv = 3, 2
    rng = np.random.default_rng(2)
    with open_gguf(file_of(group, n_kv, bias=5)) as file:
        heads = guard._heads(file, BIASED, LayerShape(group * n_kv, n_kv, D, D))
        w, b = (
            find("formats", "f32", "").FORMAT.decode(file.tensors[f"blk.1.attn_k.{x}"].data)
            for x in ("weight", "bias")
        )
    keys = rng.standard_normal((4000, E)) @ w.T + b
    np.testing.assert_allclose(heads.bias.reshape(-1), b)
    # 4,000 draws give a deviation to 1.1 %, and 128 of them 4 such errors at the most
    np.testing.assert_allclose(heads.std.reshape(-1), keys.std(0), rtol=0.045)
    assert heads.queries.shape == (n_kv, 2, D)


def test_norms_of_keys_set_their_size():
    """With a norm after the projection, a channel has the gain's size, the bias included."""

    def tensor(values):
        data = np.ascontiguousarray(values, np.float32)
        return guard_tensor(data)

    rng = np.random.default_rng(0)
    gain = np.linspace(0.5, 2, D)
    tensors = {
        "blk.0.attn_k.weight": tensor(rng.standard_normal((D, E)) * 7),
        "blk.0.attn_q.weight": tensor(rng.standard_normal((D, E))),
        "blk.0.attn_k_norm.weight": tensor(gain),
    }
    heads = guard._heads(SimpleNamespace(tensors=tensors), 0, LayerShape(1, 1, D, D))
    # rows of 128 normal numbers differ by 6 %: 4 times that
    np.testing.assert_allclose(heads.std[0], gain, rtol=0.25)


def guard_tensor(data):
    from pykv.gguf.reader import Tensor

    rows = data.view(np.uint8).reshape(*data.shape[:-1], -1)
    return Tensor("w", data.shape, "f32", 1, 4, data.nbytes, rows, "file")


def test_weights_of_unknown_names_or_damaged_ones_are_not_judged():
    shape = LayerShape(1, 1, D, D)
    assert guard._heads(SimpleNamespace(tensors={}), 0, shape) is None
    broken = guard_tensor(np.full((D, E), np.nan, np.float32))
    tensors = {f"blk.0.attn_{x}.weight": broken for x in "qk"}
    assert guard._heads(SimpleNamespace(tensors=tensors), 0, shape) is None


def test_the_error_of_scores_is_that_of_random_queries():
    rng = np.random.default_rng(1)
    errors, sizes = rng.standard_normal((64, D)) * 0.1, rng.uniform(0.1, 2, (1, D))
    queries = rng.standard_normal((4000, D)) * sizes
    expected = np.std(queries @ errors.T / np.sqrt(D))
    # of 64 keys' errors the mean square; 4,000 queries give it to about 1 %
    assert guard._score_error(errors, sizes)[0] == pytest.approx(expected, rel=0.05)


# the self-test's choice


def test_each_kind_of_encoded_layer_is_tested_once(monkeypatch):
    tested = []
    monkeypatch.setattr(guard.selftest, "check", lambda dev, *layer: tested.append(layer[:3]))
    shapes = [LayerShape(6, 2, 64, 64), LayerShape(3, 1, 64, 64, window=70)] * 2
    shapes += [LayerShape(4, 1, 80, 32)] * 2
    cache = CacheConfig("q4_0", "kivi2", override="5=k:f16,v:f16")
    numbers = [[[(i, side, head) for head in range(s.n_kv)] for side in "kv"]
               for i, s in enumerate(shapes)]  # fmt: skip
    store = Store(shapes, cache, 100, numbers=numbers)
    guard.self_test(SimpleNamespace(name="cpu", page_memory=lambda: None), store)
    assert [shape for _, shape, _ in tested] == [
        LayerShape(3, 1, 64, 64), LayerShape(4, 1, 80, 32)
    ]  # fmt: skip
    for (small, _, formats), i in zip(tested, (0, 4), strict=True):
        assert (formats.page_k, formats.page_v) == ("q4_0", "kivi2")
        assert small.formats == [formats]
        assert small.numbers == [[[(i, "k", 0)], [(i, "v", 0)]]]
    guard.self_test(SimpleNamespace(name="reference"), store)
    assert len(tested) == 2


def test_a_model_whose_kernels_err_is_not_loaded(load, file_of, monkeypatch):
    q4_0 = find("formats", "q4_0", "").FORMAT
    right = type(q4_0).dequantize
    monkeypatch.setattr(type(q4_0), "dequantize", lambda *args: right(*args) * np.float32(1.01))
    with pytest.raises(NumericsError, match=r"kernels for q4_0 keys.*--device reference"):
        load(file=file_of(3), cache=CacheConfig("q4_0", guard="off"))
    load(file=file_of(3), cache=CacheConfig("q4_0"), device="reference")


# logits


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_stop_the_step(load, file_of, monkeypatch, device, bad):
    model = load(file=file_of(), device=device)
    sequence = model.store.new_sequence()
    model.step([(sequence, np.arange(5, dtype=np.int32))], np.array([4], np.int32))
    real = model.dev.run

    def run(graph, step):
        logits = real(graph, step)
        logits[1, 17] = bad
        return logits

    monkeypatch.setattr(model.dev, "run", run)
    rows = np.array([0, 2], np.int32)
    with pytest.raises(NumericsError, match="position 7: a logit is not a finite number"):
        model.step([(sequence, np.arange(3, dtype=np.int32))], rows)
    assert model.store.length(sequence) == 5  # and the batch does not count
    monkeypatch.undo()
    model.step([(sequence, np.arange(3, dtype=np.int32))], rows)


def test_no_logits_at_all_are_fine(load, file_of):
    model = load(file=file_of())
    sequence = model.store.new_sequence()
    logits = model.step([(sequence, np.arange(3, dtype=np.int32))], np.empty(0, np.int32))
    assert logits.shape[0] == 0
