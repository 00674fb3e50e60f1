"""Compile-time parameters of the GPU's kernels, by cache type, weight type and width."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import gcd
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl

from pykv.formats.coded import CodedFormat, find
from pykv.kernels.jit_triton import is_interpreted

FLOATS = ("f16", "bf16", "f32")  # types whose pages hold the values themselves
LEAST_DOT = 16  # what tl.dot takes of every axis, at least
LEAST_VALUES = 64  # channels of a slice of values: of fewer, warps would do the same products
MOST_SLICE = 128  # channels of a page that a program decodes at a time
OUTLIERS_SLICE = 64  # and of one that has outliers
SURE_ROWS = 8  # rows of x in a product's tile, at most
# weight types whose blocks take most of the registers, and those of which two do
HEAVY, LARGE = ("q2_k", "q3_k", "q6_k", "iq4_xs"), ("q4_k", "q5_k")
STEP_VALUES, LEAST_LANES = 512, 128  # lanes of a weight's row that a warp reads at a time
STEP_BYTES = 2048  # and bytes, at most: it unpacks them in registers
INTERPRETED_VALUES = 1 << 18  # and in Triton's interpreter, with its rows of x
ROOM_ROWS, ROOM_PROMPT = 420, 640  # bytes of shared memory for each channel
WIDE_HEAD, WARPS, MORE_WARPS = 256, 4, 8
MUCH_SHARED = 200 << 10  # bytes: NVIDIA's from compute capability 9.0 on, less its small ones
FLOAT16_BITS = 16
MOST_REGISTERS = 255  # that a thread of NVIDIA's can have
LEAST_LINES, MOST_LINES = 16, 64  # query heads x queries of a prompt's program


def upto(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def module(name: str) -> ModuleType:
    """The GPU's functions of a type, whose options after a colon do not matter here."""
    return import_module(f"pykv.kernels.{name.partition(':')[0]}_triton")


def _padded(d: int) -> int:
    return (d + 31) // 32 * 32


def slices(d: int, least: int, most: int = MOST_SLICE) -> tuple[int, int]:
    """Channels that d are filled up to, at least, and those of a slice; see attention_triton.py.

    The last slice may be narrower, if that saves a quarter.
    """
    filled = -(-d // least) * least
    whole = min(upto(filled), most)
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
    precision: str = "ieee",
) -> dict[str, Any]:
    """Of `attend_rows` and `attend_prompt`, less what counts heads and queries.

    Pairs are keys and values. d: channels of a head; `pages`: those that pages have, where a
    transform makes them others. `mapped`: whether a transform takes the pages' values, whose sums
    are then kept apart. `operand`: what tiles are multiplied in; `precision`: how float32 ones are,
    see `precision`. n_rot: keys lie in the cache before RoPE, which turns so many channels.
    """
    k, v = (module(name) for name in types)
    page_k, page_v = pages or d
    of_k, of_v = _outliers(types[0], page_k), _outliers(types[1], page_v)
    most = OUTLIERS_SLICE if of_k or of_v else MOST_SLICE
    (width_k, slice_k), (width_v, slice_v), *page_slices = (
        slices(n, least, most)
        for n, least in zip((*d, page_k, page_v), (LEAST_DOT, LEAST_VALUES) * 2, strict=True)
    )
    return {
        "D_K": d[0], "D_V": d[1], "WIDTH_K": width_k, "WIDTH_V": width_v, "SLICE_K": slice_k,
        "SLICE_V": slice_v, "PAGE_K": page_k, "PAGE_V": page_v, "PAGE_WIDTH_K": page_slices[0][0],
        "PAGE_WIDTH_V": page_slices[1][0], "PAGE_SLICE_K": page_slices[0][1],
        "PAGE_SLICE_V": page_slices[1][1], "MAPPED": mapped,
        "ENCODED": types != tails, "OPERAND": operand, "PRECISION": precision,
        "TAIL_K": module(tails[0]).level, "TAIL_V": module(tails[1]).level,
        "K_BITS": k.BITS, "K_AXIS": k.KEY_AXIS, "K_PARAMETERS": k.PARAMETERS, "k_level": k.level,
        "V_BITS": v.BITS, "V_AXIS": v.VALUE_AXIS, "V_PARAMETERS": v.PARAMETERS, "v_level": v.level,
        "N_ROT": n_rot, "NEOX": neox,
        "K_OUTLIERS": of_k, "K_PLACES": max(LEAST_DOT, upto(of_k)),
        "V_OUTLIERS": of_v, "V_PLACES": max(LEAST_DOT, upto(of_v)),
    }  # fmt: skip


def options(
    types: tuple[str, str], fixed: dict[str, Any], prompt: bool, shared_bytes: int, turned: bool,
    nvidia: bool,
) -> dict[str, int]:  # fmt: skip
    """The compiler's options for a kernel with the parameters that `attention` gave.

    types: of pages. Loads for the next page while this one is decoded want room, about so many
    bytes for each channel of the wider side (measured with every pair that tests/aot compiles);
    where the device has less of it for a block, a page is loaded when it is needed. So it is where
    keys are turned, whose angles would be loaded ahead too, and where there are outliers. What does
    not fit in the registers of 4 warps, has those of 8: sums of a prompt's queries or of very wide
    heads, float32, of which tensor cores take three parts, tables, and angles. NVIDIA's
    assembler would spill some registers for another block at a time, unless told how many there
    are; not so of pages of 16 bits, which need the fewest.
    """
    d, size = max(fixed["D_K"], fixed["D_V"]), fixed["OPERAND"].primitive_bitwidth // 16
    room = d * (ROOM_PROMPT if prompt else ROOM_ROWS) * size
    table = any(hasattr(m, "LEVELS") or m.KEY_AXIS == "range" for m in map(module, types))
    many = prompt or turned or size > 1 or d > WIDE_HEAD
    found = {"num_warps": MORE_WARPS if many or table else WARPS}
    outliers = fixed["K_OUTLIERS"] or fixed["V_OUTLIERS"]
    if room > shared_bytes or turned or outliers:
        found["num_stages"] = 1
    halves = fixed["K_BITS"] == fixed["V_BITS"] == FLOAT16_BITS and not fixed["MAPPED"]
    if nvidia and not many and not halves:
        found["maxnreg"] = MOST_REGISTERS
    return found


def prompt_lines(fixed: dict[str, Any], shared_bytes: int, turned: bool) -> int:
    """Query heads x queries of a prompt's program: as many as registers of 8 warps have room for.

    fixed: what `attention` gave. Tensor cores of GPUs with so much shared memory for a block find
    operands there, others in registers.
    """
    if turned or fixed["OPERAND"] == tl.float32 or fixed["K_OUTLIERS"] or fixed["V_OUTLIERS"]:
        return LEAST_LINES
    most = MOST_SLICE if shared_bytes >= MUCH_SHARED else LEAST_VALUES
    return MOST_LINES if max(fixed["D_K"], fixed["D_V"]) <= most else MOST_LINES // 2


def sums(d: int, page_d: int | None = None) -> int:
    """f32 of one chunk's sums in `partial`; page_d: of values that transforms map, else None."""
    return _padded(d) + (0 if page_d is None else _padded(page_d))


def combination(heads: int, d: int, page_d: int | None = None) -> dict[str, Any]:
    """Of `combine` for values of d channels; page_d as in `sums`, whose number is `distance`."""
    return {
        "HEADS": heads, "D": d, "WIDTH": upto(d), "PAGE_D": page_d or d,
        "PAGE_WIDTH": upto(page_d or d), "MAPPED": page_d is not None,
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


def _most(n: int, limit: int) -> int:
    """The largest power of two up to `limit` whose multiples exceed n by half of it at most."""
    size = min(limit, upto(n))
    while size > 1 and -(-n // size) * size * 2 > n * 3:
        size //= 2
    return size


def rows_per_program(n_out: int, x_tile: int, interpreted: bool) -> tuple[int, int]:
    """Rows of a weight that a program reads as one tile, and how many such tiles it reads.

    On a GPU a row is a warp's; two share what they read of x where there are enough of them for
    132 SMs and x has few rows. In Triton's interpreter a program costs a millisecond.
    """
    if interpreted:
        return max(64, _most(n_out, 1024)), 1
    return 1, 2 if n_out >= 2048 and x_tile < 4 else 1


def _sizes(
    name: str, n_in: int, values: int, n_bytes: int, interpreted: bool
) -> tuple[int, int, int, int]:
    """A type's BLOCK_LEN, BLOCK_BYTES, LANES, and blocks read at a time.

    values: lanes to read at most; n_bytes: these too, but no fewer than LEAST_LANES lanes.
    """
    own = module(name)
    length, size, lanes = own.BLOCK_LEN, own.BLOCK_BYTES, own.LANES
    if length == 1:
        length = lanes = gcd(n_in, 32)
        size *= length
    n_blocks, most = n_in // length, max(1, values // lanes)
    if interpreted:
        return length, size, lanes, _most(n_blocks, most)
    most = min(most, max(LEAST_LANES // lanes, upto(n_bytes // size + 1) // 2))
    return length, size, lanes, min(most, upto(n_blocks))


def _rows_at_once(types: Sequence[str], gated: bool) -> int:
    """Rows of x that fit the registers beside what these types' blocks are unpacked to."""
    if any(name in HEAVY for name in types):
        return 2
    return 4 if gated and any(name in LARGE for name in types) else SURE_ROWS


def product(
    types: Sequence[str],
    n_out: Sequence[int],
    n_in: int,
    rows: int,
    interpreted: bool,
    gated: bool = False,
) -> dict[str, Any]:
    """Of `matvec`, less what it does beside products, for up to three weights and rows of x."""
    most = SURE_ROWS if interpreted else _rows_at_once(types, gated)
    x_tile, kinds = min(most, upto(rows)), [*dict.fromkeys(types)]
    tile = rows_per_program(min(n_out) if interpreted else sum(n_out), x_tile, interpreted)
    values = INTERPRETED_VALUES // tile[0] if interpreted else STEP_VALUES
    fixed: dict[str, Any] = {
        "KINDS": tuple(kinds.index(t) for t in types), "TYPES": len(kinds),
        "TILE": (*tile, x_tile), "num_warps": 1,
    }  # fmt: skip
    for i in range(3):
        name = kinds[min(i, len(kinds) - 1)]
        most = max(values // x_tile, LEAST_LANES)
        fixed[f"SIZES{i}"] = _sizes(name, n_in, most, STEP_BYTES // x_tile, interpreted)
        fixed[f"weight{i}"] = module(name).weight
    return fixed


def gated_product(
    types: tuple[str, str], n_out: int, n_in: int, rows: int, interpreted: bool
) -> dict[str, Any]:
    """Of `matvec_gated`, which reads a line of both weights, less what it does beside products."""
    fixed = product(types, [n_out], n_in, rows, interpreted, gated=True)
    del fixed["KINDS"], fixed["SIZES2"], fixed["weight2"]
    at_once, _, x_tile = fixed["TILE"]
    return fixed | {"TILE": (at_once, 1, x_tile)}


def panel_sizes(name: str, n: int, n_in: int, interpreted: bool) -> dict[str, Any]:
    """Of `decode_rows` for n rows of a weight, less what it does beside decoding."""
    rows = min(upto(n), 64 if interpreted else 2)
    values = (INTERPRETED_VALUES if interpreted else STEP_VALUES) // rows
    sizes = _sizes(name, n_in, values, STEP_BYTES, interpreted)
    return {"ROWS": rows, "SIZES": sizes, "weight": module(name).weight}


def table(name: str) -> list[float]:
    """The 16 numbers that a weight type's `weight` looks up, or zeros."""
    own = getattr(import_module(f"pykv.formats.{name}"), "TABLE", (0,) * 16)
    return [float(x) for x in own]


def operand(types: tuple[str, ...]) -> Any:
    """What tiles of these types, pages' and tails', are multiplied in."""
    if "f32" in types:
        return tl.float32
    if "bf16" in types:
        # the interpreter multiplies bfloat16 as if it were whole numbers
        return tl.float32 if is_interpreted() else tl.bfloat16
    return tl.float16


def precision(nvidia: bool) -> str:
    """How tl.dot multiplies float32: on NVIDIA's tensor cores in three parts, else one by one.

    The three are as exact as float32 but for its last bits; one by one, a warp keeps its share of
    both operands in registers, which are too few for it.
    """
    return "tf32x3" if nvidia and not is_interpreted() else "ieee"


def extra(name: str, measured: Any) -> Any:
    """What `extra` points to, f32 [KV heads, n]: a type's own table, or what was measured."""
    table = getattr(module(name), "LEVELS", None)
    if table is None:
        return measured
    return np.tile(np.resize(np.array(table, np.float32), 16), (len(measured), 1))
