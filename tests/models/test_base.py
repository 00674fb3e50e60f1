"""What a file must hold, and the sentence that says what it does not."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from pykv import registry
from pykv.errors import GGUFError, UnsupportedError
from pykv.models.base import Hparams
from pykv.tokenizer import from_metadata


def refused(made, load, error, match):
    """Loading fails with one sentence that names the file."""
    with pytest.raises(error, match=match) as caught:
        load(made.path)
    sentence = str(caught.value)
    assert made.path.name in sentence
    assert "\n" not in sentence
    assert len(sentence) < 300


REQUIRED = [
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_key_is_missing(arch, key, make, load):
    refused(make(arch, {key: None}), load, GGUFError, rf"{arch}\.{key}.* is missing")


@pytest.mark.parametrize("key", REQUIRED)
def test_a_key_has_another_type(key, make, load):
    refused(make("llama", {key: "many"}, plain=True), load, GGUFError, f"{key}.* 'many', expected")


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"block_count": 0}, r"llama\.block_count is 0, not 1 to 512"),
        ({"block_count": 100000}, r"llama\.block_count is 100000, not 1 to 512"),
        ({"block_count": -2}, r"llama\.block_count is -2"),
        ({"context_length": 0}, r"llama\.context_length is 0, not 1 to"),
        ({"embedding_length": 0}, r"llama\.embedding_length is 0, not 1 to"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, r"epsilon is -1\.0, not 0 to 1"),
        ({"attention.layer_norm_rms_epsilon": 2.0}, r"epsilon is 2\.0, not 0 to 1"),
        ({"attention.head_count": 0}, r"head_count 0 must be a positive multiple"),
        ({"attention.head_count_kv": 3}, r"head_count 4 must be .* of head_count_kv 3"),
        ({"attention.head_count_kv": 0}, r"head_count 4 must be .* of head_count_kv 0"),
        ({"attention.head_count_kv": 8}, r"head_count 4 must be .* of head_count_kv 8"),
        ({"attention.head_count_kv": [2, 2, 2]}, r"head_count_kv.* array of 2 integers"),
        ({"attention.key_length": 0}, r"key_length is 0, not 1 to 1024"),
        ({"attention.key_length": 5000}, r"key_length is 5000, not 1 to 1024"),
        ({"attention.value_length": 0}, r"value_length is 0, not 1 to 1024"),
        ({"rope.dimension_count": 0}, r"rope\.dimension_count is 0, not even and 2 to 16"),
        ({"rope.dimension_count": 7}, r"rope\.dimension_count is 7, not even and 2 to 16"),
        ({"rope.dimension_count": 32}, r"rope\.dimension_count is 32, not even and 2 to 16"),
        ({"rope.freq_base": 0.0}, r"rope\.freq_base is 0\.0, not above 1"),
        ({"rope.freq_base": float("nan")}, r"rope\.freq_base is .*nan"),
        ({"rope.freq_base": float("inf")}, r"rope\.freq_base is .*inf"),
        ({"rope.scaling.factor": -2.0}, r"rope\.scaling\.factor is -2\.0, not above 0"),
        ({"rope.scaling.attn_factor": 0.0}, r"attn_factor is 0\.0, not above 0"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0,
             "rope.scaling.original_context_length": 0},
            r"original_context_length is 0, not above 0",
        ),
    ],
)  # fmt: skip
def test_a_number_makes_no_sense(keys, match, make, load):
    refused(make("llama", keys, plain=True), load, GGUFError, match)


@pytest.mark.parametrize("kind", ["longrope", "su", "dynamic"])
@pytest.mark.parametrize("factor", [None, 4.0])
def test_an_unknown_kind_of_rope_scaling(kind, factor, make, load):
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    refused(make("llama", keys), load, UnsupportedError, f"RoPE scaling '{kind}' is not known")


def test_encoders_are_refused(make, load):
    made = make("llama", {"attention.causal": False})
    refused(made, load, UnsupportedError, r"llama\.attention\.causal is false")
    load(make("llama", {"attention.causal": True}).path)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_v.weight",
     "blk.1.attn_output.weight", "blk.0.ffn_up.weight"],
)  # fmt: skip
def test_a_tensor_is_missing(name, backend, make, load):
    made = make("llama", drop=[name])
    with pytest.raises(GGUFError, match=f"{made.path.name}.*{name}.* is missing"):
        load(made.path, backend)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("token_embd.weight", (288, 32), [288, 64]),
        ("output_norm.weight", (32,), [64]),
        ("output.weight", (287, 64), [288, 64]),
        ("blk.0.attn_q.weight", (32, 64), [64, 64]),
        ("blk.0.attn_k.weight", (64, 32), [64, 64]),
        ("blk.1.ffn_down.weight", (96, 64), [64, 96]),
        ("blk.1.ffn_down.weight", (6144,), [64, 96]),
        ("blk.1.attn_q.bias", (63,), [64]),
    ],
)
def test_a_tensor_has_another_shape(name, shape, expected, make, load):
    made = make("llama", reshape={name: shape})
    match = rf"{name}.* has shape \{list(shape)}, expected \{expected}".replace("]", r"\]")
    refused(made, load, GGUFError, match)


def test_fused_rows_that_do_not_add_up(make, load):
    made = make("llama", fused=True, reshape={"blk.1.attn_qkv.weight": (191, 64)})
    refused(made, load, GGUFError, r"attn_qkv\.weight.* has shape \[191, 64\]")


def test_more_embedding_rows_than_tokens(make, load):
    made = make("llama", reshape={"token_embd.weight": (320, 64)})
    refused(made, load, GGUFError, r"token_embd\.weight.* shape \[320, 64\], expected \[288, 64\]")


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q.scale", "blk.1.attn_q_norm.weight", "blk.2.attn_q.weight", "output.bias",
     "blk.0.ffn_gate_inp.weight"],
)  # fmt: skip
def test_tensors_that_the_graph_does_not_know_are_not_ignored(name, make, load):
    made = make("llama", extra={name: np.ones(16, np.float32)})
    refused(made, load, UnsupportedError, name)


def test_many_unknown_tensors_are_counted(make, load):
    extra = {f"blk.{i}.what.weight": np.ones(16, np.float32) for i in range(5)}
    refused(make("llama", extra=extra), load, UnsupportedError, "and 2 more; without them")


@pytest.mark.parametrize("name", ["lama", "gemma4", "../llama", "", "base", "blocks"])
def test_an_unknown_architecture(name):
    with pytest.raises(UnsupportedError, match="unknown architecture .*known are .*llama"):
        registry.find("models", name, "architecture")


def test_hparams_of_a_file(make, load):
    keys = {"attention.head_count_kv": 2, "attention.key_length": 24, "attention.value_length": 24}
    h = load(make("llama", keys).path).graph.h
    assert h == Hparams(
        "llama", 512, 64, 2, (96, 96), (4, 4), (2, 2), 24, 24, 288, pytest.approx(1e-5)
    )


@pytest.mark.parametrize("vocab", ["spm", "gpt2"])
def test_the_small_vocabularies_are_vocabularies(vocab, make, load):
    """The files of these tests are whole models: their tokenizer loads, and text survives it."""
    runner = load(make("llama", vocab=vocab).path)
    tokenizer = from_metadata(runner.file.metadata, where="test")
    ids = tokenizer.encode("the hat, and the é")
    assert tokenizer.decode(ids).strip() == "the hat, and the é"
    assert runner.logits(ids).shape == (len(ids), 288)


def test_types_without_kernels_are_decoded_with_a_warning(make, load, tokens, caplog):
    # rows of 48 values are no whole blocks of 32: the kernels take none, the reference takes all
    keys = {"embedding_length": 48}
    made = make("llama", keys, types="F16")
    with caplog.at_level(logging.WARNING, "pykv"):
        runner = load(made.path, "cpu")
    assert "no multiple of 32" in caplog.text
    ids = tokens(20)
    assert np.abs(runner.logits(ids) - load(made.path).logits(ids)).max() < 1e-4
