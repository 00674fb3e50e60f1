"""Typed reads: what is taken, and the sentence for what is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pykv.errors import GGUFError
from pykv.gguf.metadata import Metadata


@pytest.fixture
def meta() -> Metadata:
    meta = Metadata()
    meta.file = "m.gguf"
    meta.metadata = {
        "int": 7,
        "big": 2**64 - 1,
        "float": 0.5,
        "nan": math.nan,
        "bool": True,
        "str": "x" * 60,
        "strings": [b"a"],
        "ints": np.array([1, 2, 3], "u8"),
        "bools": np.array([True, False]),
        "floats": np.array([1.0, 2.0], "f4"),
        "none": np.array([], "i4"),
    }
    return meta


def test_values_come_back_as_their_type(meta):
    assert meta.get_int("int") == 7
    assert meta.get_int("big") == 2**64 - 1
    assert meta.get_float("float") == 0.5
    got = meta.get_float("int")
    assert (got, type(got)) == (7.0, float)
    assert meta.get_bool("bool") is True
    assert meta.get_str("str") == "x" * 60
    assert meta.get_ints("int", 3) == [7, 7, 7]
    assert meta.get_ints("ints", 3) == [1, 2, 3]
    assert meta.get_ints("bools", 2) == [1, 0]
    assert all(type(v) is int for v in meta.get_ints("ints", 3))


def test_a_default_stands_in_for_a_missing_key_only(meta):
    assert meta.get_int("no", 3) == 3
    assert meta.get_int("no", None) is None
    assert meta.get_float("no", default=1.5) == 1.5
    assert meta.get_str("no", None) is None
    assert meta.get_bool("no", False) is False
    assert meta.get_ints("no", 2, [4, 4]) == [4, 4]
    with pytest.raises(GGUFError, match="is the float 0.5, expected an integer"):
        meta.get_int("float", 3)


WRONG = [
    (lambda m: m.get_int("no"), "key no is missing, expected an integer"),
    (lambda m: m.get_float("no"), "key no is missing, expected a number"),
    (lambda m: m.get_str("no"), "key no is missing, expected a string"),
    (lambda m: m.get_bool("no"), "key no is missing, expected a bool"),
    (lambda m: m.get_ints("no", 2), "key no is missing, expected an integer or an array of 2"),
    (lambda m: m.get_int("bool"), "key bool is the bool True, expected an integer"),
    (lambda m: m.get_int("ints"), "key ints is an array of 3 uint64 values, expected an integer"),
    (lambda m: m.get_float("bool"), "key bool is the bool True, expected a number"),
    (lambda m: m.get_float("nan"), "key nan is the float nan, expected a finite number"),
    (lambda m: m.get_str("strings"), "key strings is an array of 1 string, expected a string"),
    (lambda m: m.get_bool("int"), "key int is the int 7, expected a bool"),
    (lambda m: m.get_float("str"), f"is the string '{'x' * 37}...', expected a number"),
    (lambda m: m.get_ints("ints", 2), "array of 3 uint64 values, expected an integer or an array"),
    (lambda m: m.get_ints("floats", 2), "key floats is an array of 2 float32 values, expected"),
    (lambda m: m.get_ints("none", 2), "key none is an array of 0 int32 values, expected"),
    (lambda m: m.get_ints("bool", 2), "key bool is the bool True, expected"),
    (lambda m: m.get_ints("strings", 1), "key strings is an array of 1 string, expected"),
]


@pytest.mark.parametrize(("read", "fragment"), WRONG)
def test_a_wrong_value_is_named(meta, read, fragment):
    with pytest.raises(GGUFError) as caught:
        read(meta)
    assert str(caught.value).startswith("m.gguf: metadata key ")
    assert fragment in str(caught.value)
