"""Typed reads of GGUF metadata, with a sentence for what is missing or of another type.

Integers of any width count as integers, and floats of any width and integers as floats.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final, Literal, TypeVar, overload

import numpy as np

from pykv.errors import GGUFError
from pykv.gguf.header import MetadataValue, counted, shown

T = TypeVar("T")


class _Required(Enum):
    REQUIRED = 0


_REQUIRED: Final = _Required.REQUIRED
_RequiredType = Literal[_Required.REQUIRED]


def describe(value: MetadataValue) -> str:
    """A value in words, short enough for a sentence."""
    if isinstance(value, np.ndarray):
        return f"an array of {counted(value.size, f'{value.dtype.name} value')}"
    if isinstance(value, list):
        return f"an array of {counted(len(value), 'string')}"
    if isinstance(value, str):
        return f"the string {ascii(value) if len(value) <= 40 else ascii(value[:37] + '...')}"
    return f"the {type(value).__name__} {value}"


class Metadata:
    """The getters of a file: `file` is its name for messages, `metadata` its keys.

    Each raises GGUFError for a value of another type, and for a missing key without a default.
    """

    file: str
    metadata: dict[str, MetadataValue]

    def _get(self, key: str, default: T | _RequiredType, expected: str) -> MetadataValue | T:
        if key in self.metadata:
            return self.metadata[key]
        if default is _REQUIRED:
            raise GGUFError(
                f"{self.file}: metadata key {shown(key)} is missing, expected {expected}"
            )
        return default

    def _wrong(self, key: str, expected: str) -> GGUFError:
        return GGUFError(
            f"{self.file}: metadata key {shown(key)} is {describe(self.metadata[key])}, "
            f"expected {expected}"
        )

    @overload
    def get_int(self, key: str) -> int: ...
    @overload
    def get_int(self, key: str, default: T) -> int | T: ...
    def get_int(self, key: str, default: T | _RequiredType = _REQUIRED) -> int | T:
        """An integer of any width."""
        value = self._get(key, default, "an integer")
        if key not in self.metadata:
            return value  # type: ignore[return-value]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer")
        return value

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: T) -> float | T: ...
    def get_float(self, key: str, default: T | _RequiredType = _REQUIRED) -> float | T:
        """A finite float, or an integer as one."""
        value = self._get(key, default, "a number")
        if key not in self.metadata:
            return value  # type: ignore[return-value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: T) -> str | T: ...
    def get_str(self, key: str, default: T | _RequiredType = _REQUIRED) -> str | T:
        """A string; bytes that are not UTF-8 are surrogates."""
        value = self._get(key, default, "a string")
        if key not in self.metadata:
            return value  # type: ignore[return-value]
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: T) -> bool | T: ...
    def get_bool(self, key: str, default: T | _RequiredType = _REQUIRED) -> bool | T:
        """A bool."""
        value = self._get(key, default, "a bool")
        if key not in self.metadata:
            return value  # type: ignore[return-value]
        if not isinstance(value, bool):
            raise self._wrong(key, "a bool")
        return value

    @overload
    def get_ints(self, key: str, n: int) -> list[int]: ...
    @overload
    def get_ints(self, key: str, n: int, default: T) -> list[int] | T: ...
    def get_ints(self, key: str, n: int, default: T | _RequiredType = _REQUIRED) -> list[int] | T:
        """One integer per layer: an array of `n` integers or bools, or one integer for all."""
        expected = f"an integer or an array of {counted(n, 'integer')}"
        value = self._get(key, default, expected)
        if key not in self.metadata:
            return value  # type: ignore[return-value]
        if isinstance(value, int) and not isinstance(value, bool):
            return [value] * n
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iub" or value.size != n:
            raise self._wrong(key, expected)
        return [int(v) for v in value]
