"""Every ggml tensor type and every metadata value type that a GGUF file can name: data only.

Source: llama.cpp ggml/include/ggml.h, enum ggml_type; ggml/src/ggml-common.h, the block structs;
ggml/include/gguf.h, enum gguf_type.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """How a type lays out a row: `block_len` values in `block_bytes` bytes."""

    name: str
    block_len: int  # values; 0 for a removed type
    block_bytes: int  # bytes; 0 for a removed type
    in_files: bool = True  # False: a type of activations, which no model file should hold
    requantise_to: str = ""  # for a removed type, the type that took its place


class ValueType(NamedTuple):
    """How one metadata value is stored, as a little-endian numpy dtype and its size."""

    name: str
    dtype: str  # empty for strings and arrays
    nbytes: int  # bytes of one value; for a string, of its length field


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("f32", 1, 4),
    1: TensorType("f16", 1, 2),
    2: TensorType("q4_0", 32, 18),
    3: TensorType("q4_1", 32, 20),
    4: TensorType("q4_2", 0, 0, requantise_to="q4_0"),
    5: TensorType("q4_3", 0, 0, requantise_to="q4_0"),
    6: TensorType("q5_0", 32, 22),
    7: TensorType("q5_1", 32, 24),
    8: TensorType("q8_0", 32, 34),
    9: TensorType("q8_1", 32, 36, in_files=False),
    10: TensorType("q2_k", 256, 84),
    11: TensorType("q3_k", 256, 110),
    12: TensorType("q4_k", 256, 144),
    13: TensorType("q5_k", 256, 176),
    14: TensorType("q6_k", 256, 210),
    15: TensorType("q8_k", 256, 292, in_files=False),
    16: TensorType("iq2_xxs", 256, 66),
    17: TensorType("iq2_xs", 256, 74),
    18: TensorType("iq3_xxs", 256, 98),
    19: TensorType("iq1_s", 256, 50),
    20: TensorType("iq4_nl", 32, 18),
    21: TensorType("iq3_s", 256, 110),
    22: TensorType("iq2_s", 256, 82),
    23: TensorType("iq4_xs", 256, 136),
    24: TensorType("i8", 1, 1),
    25: TensorType("i16", 1, 2),
    26: TensorType("i32", 1, 4),
    27: TensorType("i64", 1, 8),
    28: TensorType("f64", 1, 8),
    29: TensorType("iq1_m", 256, 56),
    30: TensorType("bf16", 1, 2),
    31: TensorType("q4_0_4_4", 0, 0, requantise_to="q4_0"),
    32: TensorType("q4_0_4_8", 0, 0, requantise_to="q4_0"),
    33: TensorType("q4_0_8_8", 0, 0, requantise_to="q4_0"),
    34: TensorType("tq1_0", 256, 54),
    35: TensorType("tq2_0", 256, 66),
    36: TensorType("iq4_nl_4_4", 0, 0, requantise_to="iq4_nl"),
    37: TensorType("iq4_nl_4_8", 0, 0, requantise_to="iq4_nl"),
    38: TensorType("iq4_nl_8_8", 0, 0, requantise_to="iq4_nl"),
    39: TensorType("mxfp4", 32, 17),
    40: TensorType("nvfp4", 64, 36),
    41: TensorType("q1_0", 128, 18),
    42: TensorType("q2_0", 64, 18),
}

TENSOR_TYPE_IDS: dict[str, int] = {t.name: i for i, t in TENSOR_TYPES.items()}

STRING, ARRAY, BOOL = 8, 9, 7  # the value type ids that are read in their own way

VALUE_TYPES: dict[int, ValueType] = {
    0: ValueType("uint8", "<u1", 1),
    1: ValueType("int8", "<i1", 1),
    2: ValueType("uint16", "<u2", 2),
    3: ValueType("int16", "<i2", 2),
    4: ValueType("uint32", "<u4", 4),
    5: ValueType("int32", "<i4", 4),
    6: ValueType("float32", "<f4", 4),
    BOOL: ValueType("bool", "|b1", 1),
    STRING: ValueType("string", "", 8),
    ARRAY: ValueType("array", "", 12),
    10: ValueType("uint64", "<u8", 8),
    11: ValueType("int64", "<i8", 8),
    12: ValueType("float64", "<f8", 8),
}
