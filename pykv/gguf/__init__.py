"""GGUF files: read them without trusting them, and without copying their weights."""

from pykv.gguf.header import MetadataValue
from pykv.gguf.reader import GGUFFile, Tensor, open_gguf
from pykv.gguf.types import TENSOR_TYPE_IDS, TENSOR_TYPES, VALUE_TYPES, TensorType, ValueType

__all__ = [
    "TENSOR_TYPES",
    "TENSOR_TYPE_IDS",
    "VALUE_TYPES",
    "GGUFFile",
    "MetadataValue",
    "Tensor",
    "TensorType",
    "ValueType",
    "open_gguf",
]
