"""Compile-time parameters of the GPU's kernels, by cache type, weight type and width."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl

from pykv.formats.coded import CodedFormat, find

LEAST_DOT = 16  # what tl.dot takes of every axis, at least
LEAST_VALUES = 64  # channels of a slice of values: of fewer, warps would do the same products
MOST_SLICE = 128  # channels of a page that a program decodes at a time
ROOM_ROWS, ROOM_PROMPT = 420, 640  # bytes of shared memory for each channel
WIDE_HEAD, WARPS, MORE_WARPS = 256, 4, 8
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


def slices(d: int, least: int) -> tuple[int, int]:
    """Channels that d are filled up to, at least, and those of a slice; see attention_triton.py.

    The last slice may be narrower, if that saves a quarter.
    """
    filled = -(-d // least) * least
    whole = min(upto(filled), MOST_SLICE)
    full, rest = divmod(filled, whole)
    if filled < whole:
        half = whole // 2
        narrow = half + upto(filled - half)
        return (narrow, half) if narrow * 4 <= whole * 3 else (whole, whole)
    return full * whole + (upto(rest) if rest else 0), whole


def _outliers(name: str, d: int) -> int:
    format_ = find(name)
    return format_.n_outliers(d) if isinstance(format_, CodedFormat) else 0


def attention(
    types: tuple[str, str],
    d: tuple[int, int],
    pages: tuple[int, int] | None = None,
    mapped: bool = False,
    tails: tuple[str, str] = ("f16", "f16"),
    operand: Any = tl.float16,
    n_rot: int = 0,
    neox: bool = False,
) -> dict[str, Any]:
    """Of `attend_rows` and `attend_prompt`, less what counts heads and queries.

    Pairs are keys and values. d: channels of a head; `pages`: those that pages have, where a
    transform makes them others. `mapped`: whether a transform takes the pages' values, whose sums
    are then kept apart. `operand`: what tiles are multiplied in. n_rot: keys lie in the cache
    before RoPE, which turns so many channels.
    """
    k, v = (module(name) for name in types)
    page_k, page_v = pages or d
    of_k, of_v = _outliers(types[0], page_k), _outliers(types[1], page_v)
    (width_k, slice_k), (width_v, slice_v) = slices(d[0], LEAST_DOT), slices(d[1], LEAST_VALUES)
    page_slices = slices(page_k, LEAST_DOT), slices(page_v, LEAST_VALUES)
    return {
        "D_K": d[0], "D_V": d[1], "WIDTH_K": width_k, "WIDTH_V": width_v, "SLICE_K": slice_k,
        "SLICE_V": slice_v, "PAGE_K": page_k, "PAGE_V": page_v, "PAGE_WIDTH_K": page_slices[0][0],
        "PAGE_WIDTH_V": page_slices[1][0], "PAGE_SLICE_K": page_slices[0][1],
        "PAGE_SLICE_V": page_slices[1][1], "MAPPED": mapped,
        "ENCODED": types != tails, "OPERAND": operand,
        "TAIL_K": module(tails[0]).level, "TAIL_V": module(tails[1]).level,
        "K_BITS": k.BITS, "K_AXIS": k.KEY_AXIS, "K_PARAMETERS": k.PARAMETERS, "k_level": k.level,
        "V_BITS": v.BITS, "V_AXIS": v.VALUE_AXIS, "V_PARAMETERS": v.PARAMETERS, "v_level": v.level,
        "N_ROT": n_rot, "NEOX": neox,
        "K_OUTLIERS": of_k, "K_PLACES": max(LEAST_DOT, upto(of_k)),
        "V_OUTLIERS": of_v, "V_PLACES": max(LEAST_DOT, upto(of_v)),
    }  # fmt: skip


def options(
    d: tuple[int, int], prompt: bool, shared_bytes: int, operand_bytes: int = 2
) -> dict[str, int]:
    """The compiler's options for attention with heads of d channels of keys and of values.

    Loads for the next page while this one is decoded want room, about so many bytes for each
    channel of the wider side (measured with every pair that tests/aot compiles); where the device
    has less of it for a block, a page is loaded when it is needed. Sums of very wide heads would
    not fit in the registers of 4 warps.
    """
    room = max(d) * (ROOM_PROMPT if prompt else ROOM_ROWS) * operand_bytes // 2
    fixed = {"num_warps": MORE_WARPS if max(d) > WIDE_HEAD else WARPS}
    return fixed if room <= shared_bytes else fixed | {"num_stages": 1}


def sums(d: int, page_d: int | None = None) -> int:
    """f32 of one chunk's sums in `partial`; page_d: of values that transforms map, else None."""
    return _padded(d) + (0 if page_d is None else _padded(page_d))


def combination(heads: int, d: int, page_d: int | None = None) -> dict[str, Any]:
    """Of `combine` for values of d channels; page_d as in `sums`, whose number is `distance`."""
    return {
        "HEADS": heads, "D": d, "WIDTH": upto(d), "PAGE_D": page_d or d,
        "PAGE_WIDTH": upto(page_d or d), "MAPPED": page_d is not None,
    }  # fmt: skip


def encoder(name: str, side: str, d: int, tail: str = "f16") -> dict[str, Any]:
    """Of `encode_pages` for keys or values of d channels."""
    own, keys = module(name), side == "key"
    return {
        "KEYS": keys, "TAIL": module(tail).level, "D": d,
        "WIDTH": upto(d if keys else _padded(d)), "BITS": own.BITS,
        "AXIS": own.KEY_AXIS if keys else own.VALUE_AXIS, "PARAMETERS": own.PARAMETERS,
        "fit": own.fit, "code": own.code,
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
