"""Compile-time parameters of the GPU's kernels, by cache type, weight type and width."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl

from pykv.formats.coded import CodedFormat, find

LEAST_DOT = 16  # what tl.dot takes of every axis, at least
STEP_VALUES = 256  # weights of a row that a program reads at a time
WEIGHT_ROWS = 4  # rows that a program reads


def upto(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def module(name: str) -> ModuleType:
    """The GPU's functions of a type, whose options after a colon do not matter here."""
    return import_module(f"pykv.kernels.{name.partition(':')[0]}_triton")


def _padded(d: int) -> int:
    return (d + 31) // 32 * 32


def _outliers(name: str, d: int) -> int:
    format_ = find(name)
    return format_.n_outliers(d) if isinstance(format_, CodedFormat) else 0


def attention(
    types: tuple[str, str],
    d: tuple[int, int],
    pages: tuple[int, int] | None = None,
    tails: tuple[str, str] = ("f16", "f16"),
    operand: Any = tl.float16,
    n_rot: int = 0,
    neox: bool = False,
) -> dict[str, Any]:
    """Of `attend_rows` and `attend_prompt`, less what counts heads and queries.

    Pairs are keys and values. d: channels of a head; `pages`: those that pages have, where a
    transform makes them others. `operand`: what tiles are multiplied in. n_rot: keys lie in the
    cache before RoPE, which turns so many channels.
    """
    k, v = (module(name) for name in types)
    page_k, page_v = pages or d
    of_k, of_v = _outliers(types[0], page_k), _outliers(types[1], page_v)
    return {
        "D_K": d[0], "D_V": d[1], "WIDTH_K": upto(d[0]), "WIDTH_V": upto(_padded(d[1])),
        "PAGE_K": page_k, "PAGE_V": page_v, "PAGE_WIDTH_K": upto(page_k),
        "PAGE_WIDTH_V": upto(_padded(page_v)), "MAPPED": pages is not None,
        "ENCODED": types != tails, "OPERAND": operand,
        "TAIL_K": module(tails[0]).level, "TAIL_V": module(tails[1]).level,
        "K_BITS": k.BITS, "K_AXIS": k.KEY_AXIS, "K_PARAMETERS": k.PARAMETERS, "k_level": k.level,
        "V_BITS": v.BITS, "V_AXIS": v.VALUE_AXIS, "V_PARAMETERS": v.PARAMETERS, "v_level": v.level,
        "N_ROT": n_rot, "NEOX": neox,
        "K_OUTLIERS": of_k, "K_PLACES": max(LEAST_DOT, upto(of_k)),
        "V_OUTLIERS": of_v, "V_PLACES": max(LEAST_DOT, upto(of_v)),
    }  # fmt: skip


def encoder(
    name: str, side: str, d: int, tail: str = "f16", mapped: bool = False
) -> dict[str, Any]:
    """Of `encode_pages` for keys or values of d channels; `mapped`: they are not the tail's."""
    own, keys, outliers = module(name), side == "key", _outliers(name, d)
    format_: Any = find(name)
    return {
        "KEYS": keys, "MAPPED": mapped, "TAIL": module(tail).level, "D": d, "BITS": own.BITS,
        "AXIS": own.KEY_AXIS if keys else own.VALUE_AXIS, "PARAMETERS": own.PARAMETERS,
        "LENGTHS": getattr(own, "LENGTHS", False), "OUTLIERS": outliers,
        "ENDS": format_.n_ends(d) if outliers else 0,
        "fit": own.fit, "code": own.code, "level": own.level,
    }  # fmt: skip


def product(name: str, rows: int, add: bool) -> dict[str, Any]:
    """Of `matvec` for so many rows of x."""
    own = module(name)
    return {
        "BLOCK_LEN": own.BLOCK_LEN, "BLOCK_BYTES": own.BLOCK_BYTES, "ROWS": WEIGHT_ROWS,
        "STEP": max(1, STEP_VALUES // own.BLOCK_LEN), "X_ROWS": rows, "X_TILE": upto(rows),
        "ADD": add, "weight": own.weight,
    }  # fmt: skip


def extra(name: str, measured: Any) -> Any:
    """What `extra` points to, f32 [KV heads, n]: a type's own table, or what was measured."""
    table = getattr(module(name), "LEVELS", None)
    if table is None:
        return measured
    return np.tile(np.resize(np.array(table, np.float32), 16), (len(measured), 1))
