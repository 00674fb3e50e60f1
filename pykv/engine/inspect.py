"""What a model file holds, as plain values: metadata, tensors by type, what its cache costs."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from pykv import registry
from pykv.errors import GGUFError
from pykv.gguf import GGUFFile, open_gguf

_SHOWN = 4  # values of an array that are reported; its length is, too


def report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything about a file that its header tells; reads no weights.

    Keys: path, version, architecture; metadata (key -> value; arrays of more than 4 values as
    their length and first values); tensors (count, values, bytes, and the same per type); model
    (layers, heads, kv_heads, widths in values, context in tokens; None where the file does not
    say; shared_values, whether values are the first channels of the keys); cache (per cache type:
    bits a value, and bytes a token of keys, of values and of both; empty where the file holds no
    attention shape).  Raises GGUFError as `open_gguf` does, and for a
    key of another type than its meaning asks for.
    """
    with open_gguf(path) as file:
        architecture = file.get_str("general.architecture", "")
        model = _model(file, architecture)
        return {
            "path": str(path),
            "version": file.version,
            "architecture": _clean(architecture),
            "metadata": {_clean(k): _short(v) for k, v in file.metadata.items()},
            "tensors": _tensors(file),
            "model": model,
            "cache": _cache(model),
        }


def _clean(text: str | bytes) -> str:
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogateescape")
    return text.decode("utf-8", "replace")


def _short(value: Any) -> Any:
    """A metadata value that JSON can hold."""
    if isinstance(value, np.ndarray | list):
        first = [_short(v) for v in value[:_SHOWN]]
        return first if len(value) <= _SHOWN else {"length": len(value), "first": first}
    if isinstance(value, str | bytes):
        return _clean(value)
    if isinstance(value, np.generic):
        return _short(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _tensors(file: GGUFFile) -> dict[str, Any]:
    types: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        row = types.setdefault(
            tensor.type, {"type": tensor.type, "count": 0, "values": 0, "bytes": 0}
        )
        row["count"] += 1
        row["values"] += math.prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    return {
        "count": len(file.tensors),
        "values": sum(t["values"] for t in types.values()),
        "bytes": file.nbytes,
        "types": sorted(types.values(), key=lambda t: -int(t["bytes"])),
    }


def _model(file: GGUFFile, architecture: str) -> dict[str, Any]:
    def number(key: str) -> int | None:
        return file.get_int(f"{architecture}.{key}", None)

    layers, heads = number("block_count"), _heads(file, f"{architecture}.attention.head_count")
    kv_heads = _heads(file, f"{architecture}.attention.head_count_kv")
    embedding = number("embedding_length")
    width = None
    if embedding is not None and isinstance(heads, int) and heads > 0:
        width = embedding // heads
    key_width = number("attention.key_length")
    value_width = number("attention.value_length")
    return {
        "layers": layers,
        "embedding_width": embedding,
        "feed_forward_width": _heads(file, f"{architecture}.feed_forward_length"),
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "key_width": width if key_width is None else key_width,
        "value_width": width if value_width is None else value_width,
        # values are the first channels of the keys, and cost nothing
        "shared_values": number("attention.key_length_mla") is not None,
        "context": number("context_length"),
        "sliding_window": number("attention.sliding_window"),
        "vocabulary": _vocabulary(file, number("vocab_size")),
    }


def _heads(file: GGUFFile, key: str) -> int | list[int] | None:
    """One number for all layers, or one per layer."""
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu":
            raise GGUFError(f"{file.file}: metadata key {key} is no array of integers")
        return [int(v) for v in value]
    return file.get_int(key, None)


def _vocabulary(file: GGUFFile, size: int | None) -> int | None:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else size


def _cache(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Per cache type, the bytes of one token over all layers, sliding windows not counted off."""
    layers, kv_heads = model["layers"], model["kv_heads"]
    key_width, value_width = model["key_width"], model["value_width"]
    if None in (layers, kv_heads, key_width, value_width) or min(key_width, value_width) < 1:
        return []
    shared = model["shared_values"] and value_width < key_width
    n_heads = sum(kv_heads) if isinstance(kv_heads, list) else layers * kv_heads
    rows = []
    for name in registry.names("formats"):
        format_ = registry.find("formats", name, "cache type").FORMAT
        turns = getattr(format_, "key_position", "write") == "read"
        if "cache" not in format_.roles or (shared and turns):
            continue
        bits = (
            format_.bits_per_value(key_width, "key"),
            format_.bits_per_value(value_width, "value"),
        )
        keys, values = n_heads * key_width * bits[0] / 8, n_heads * value_width * bits[1] / 8
        mean = (bits[0] + bits[1]) / 2
        if shared:  # each part of a key has a page, and scales, of its own
            parts = (value_width, key_width - value_width)
            each = sum(part * format_.bits_per_value(part, "key") for part in parts)
            keys, values, mean = n_heads * each / 8, 0.0, each / key_width
        rows.append(
            {
                "type": name,
                "bits_per_value": round(mean, 4),
                "key_bytes": round(keys, 1),
                "value_bytes": round(values, 1),
                "bytes": round(keys + values, 1),
            }
        )
    return sorted(rows, key=lambda row: -float(row["bytes"]))
