"""The type tables against the `gguf` package's, and the ids that it does not know by ggml.h."""

from __future__ import annotations

import gguf
import numpy as np

from pykv.gguf.types import TENSOR_TYPE_IDS, TENSOR_TYPES, VALUE_TYPES


def test_every_type_of_gguf_py_has_its_name_and_block():
    for kind in gguf.GGMLQuantizationType:
        ours = TENSOR_TYPES[kind.value]
        block = gguf.GGML_QUANT_SIZES[kind]
        # gguf-py counts two f32 where ggml-common.h's block_q8_1 has two f16
        expected = (32, 36) if kind.name == "Q8_1" else block
        assert (ours.name, (ours.block_len, ours.block_bytes)) == (kind.name.lower(), expected)


def test_ids_that_gguf_py_does_not_have():
    newer = {42: ("q2_0", 64, 18)}
    removed = {4, 5, 31, 32, 33, 36, 37, 38}  # ggml.h, the commented-out ids
    known = {kind.value for kind in gguf.GGMLQuantizationType}
    assert set(TENSOR_TYPES) == known | removed | set(newer)
    assert {i for i, t in TENSOR_TYPES.items() if t.requantise_to} == removed
    assert {i: TENSOR_TYPES[i][:3] for i in newer} == newer


def test_removed_types_name_one_that_lives():
    for kind in TENSOR_TYPES.values():
        if kind.requantise_to:
            assert TENSOR_TYPES[TENSOR_TYPE_IDS[kind.requantise_to]].block_len > 0


def test_only_activation_types_are_never_in_files():
    assert [t.name for t in TENSOR_TYPES.values() if not t.in_files] == ["q8_1", "q8_k"]


def test_value_types_match_gguf_py():
    assert {i: t.name for i, t in VALUE_TYPES.items()} == {
        kind.value: kind.name.lower() for kind in gguf.GGUFValueType
    }
    for kind in VALUE_TYPES.values():
        if kind.dtype:
            assert np.dtype(kind.dtype) == np.dtype(kind.name)
            assert np.dtype(kind.dtype).itemsize == kind.nbytes
