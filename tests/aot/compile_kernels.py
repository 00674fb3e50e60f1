"""Compiles kernels for GPUs that need not be here; prints one JSON object each.

A program of its own, since the tests' process has Triton's interpreter:
    python compile_kernels.py attend@q4_0/f16@128@sm_90 encode@kivi2/key@64@gfx942 ...
Attention's widths may be two, of keys and of values: 576/512. Its pair may be followed by options:
q4_0/q4_0,operand=bf16,group=16,pages=64/48 (operand: what is multiplied in; group: query heads of
a KV head; pages: widths that transforms make; kept: under a policy whose sinks have queries).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pykv.kernels import (
    elementwise_triton,
    launch_triton,
    matvec_triton,
    move_triton,
    statistics_triton,
    write_triton,
)
from pykv.kernels.attention_triton import attend_prompt, attend_rows, combine
from pykv.kernels.encode_triton import encode_pages, gather_pages

GROUP = 4
POINTERS = {
    "pool": "*u8", "records": "*i64", "rows": "*i32", "moves": "*i64", "flags": "*i64",
    "numbers": "*i64", "places": "*i64", "flag": "*i32",
    **dict.fromkeys(("w", "w0", "w1", "w2"), "*u8"),
    **dict.fromkeys(
        ("q", "q_pages", "partial", "stats", "extra_k", "extra_v", "extra", "x", "out", "out_pages",
         "q_sinks", "each",
         "add", "table", "offset_cos", "offset_sin", "start_cos", "start_sin", "table0", "table1",
         "table2", "out0", "out1", "out2", "norm", "weight", "k", "v", "y", "cos", "sin",
         "mapped"), "*fp32",
    ),
}  # fmt: skip
FLOATS = ("scale", "eps", "factor")
GIVEN = ("operand", "group", "pages")  # options of attention
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
WIDE = re.compile(
    r"ld\.global[.\w]*\.v4\.b32|cp\.async\.c[ag]\S* \[[^\]]*\], \[[^\]]*\], 0x10|cp\.async\.cg"
)
NARROW = re.compile(r"ld\.global[.\w:]*\.b(?:8|16)\s|cp\.async\.ca\S* \[[^\]]*\], \[[^\]]*\], 0x4")
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}  # bytes of a block
OPERANDS = {"f16": tl.float16, "bf16": tl.bfloat16, "f32": tl.float32}


def pair_of(text: str) -> tuple[int, int]:
    """Of keys and of values: "576/512", or one number for both."""
    first, _, second = text.partition("/")
    return int(first), int(second or first)


def attention(key: str, value: str, d: str, target: str) -> tuple[dict[str, Any], int]:
    """Compile-time parameters, and the group; keys that nuq encodes are turned where they are read.

    `value` may have options; see above.
    """
    value, *options = value.split(",")
    given = dict(each.split("=") for each in options if each.partition("=")[0] in GIVEN)
    turned = pair_of(d)[0] if launch_triton.module(key).KEY_AXIS == "range" else 0
    operand, pages = given.get("operand", "f16"), given.get("pages")
    tail = "f16" if operand == "f32" else operand
    fixed = launch_triton.attention(
        (key, value), pair_of(d), pair_of(pages) if pages else None, mapped=pages is not None,
        tails=(tail, tail), operand=OPERANDS[operand], n_rot=turned,
        precision=launch_triton.precision(target.startswith("sm_")),
    )  # fmt: skip
    return fixed, int(given.get("group", GROUP))


def target_of(name: str) -> GPUTarget:
    """sm_90 and its like, or gfx942."""
    return GPUTarget("cuda", int(name[3:]), 32) if name[:3] == "sm_" else GPUTarget("hip", name, 64)


def attend(key: str, value: str, d: str, target: str) -> Any:
    """The decode kernel for a pair of types."""
    fixed, group = attention(key, value, d, target)
    kept = "kept" in value.split(",")
    value = value.partition(",")[0]
    tile = max(launch_triton.LEAST_DOT, launch_triton.upto(group))
    counts = {"GROUP": group, "TILE": tile, "KEPT": kept, "SINKS": kept}
    # attention may fuse a product and a sum; encoders may not
    return made(
        attend_rows, fixed | counts | chosen((key, value), False, fixed, target), target, True
    )


def sums(key: str, value: str, d: str, target: str) -> Any:
    """The column sums of attention for keys of a type, value being what `attend` takes."""
    fixed, group = attention(key, value, d, target)
    value = value.partition(",")[0]
    tile = max(launch_triton.LEAST_DOT, launch_triton.upto(group))
    counts = {"GROUP": group, "TILE": tile, "SINKS": True, "EACH": False}
    options = chosen((key, value), False, fixed, target)
    fixed = statistics_triton.parameters(fixed) | counts | options
    return made(statistics_triton.column_sums, fixed, target, True)


def decode(name: str, side: str, d: str, target: str) -> Any:
    """Pages of a type as float32."""
    return made(move_triton.decode_pages, move_triton.decoder(name, side, int(d)), target, False)


def prompt(key: str, value: str, d: str, target: str) -> Any:
    """The prompt kernel for a pair of types."""
    fixed, group = attention(key, value, d, target)
    value = value.partition(",")[0]
    lines = launch_triton.prompt_lines(fixed, SHARED[target], fixed["N_ROT"] > 0)
    lines = max(lines, launch_triton.upto(group))
    counts = {"GROUP": group, "QUERIES": lines // group, "LINES": lines}
    return made(
        attend_prompt, fixed | counts | chosen((key, value), True, fixed, target), target, True
    )


def combined(d: str, page_d: str, heads: str, target: str) -> Any:
    """The sums of chunks, for values of d channels; page_d: of mapped ones, or none."""
    fixed = launch_triton.combination(int(heads), int(d), None if page_d == "none" else int(page_d))
    return made(combine, fixed, target, True)


def encode(name: str, side: str, d: str, target: str) -> Any:
    """The encoder of a type's keys or values, `key+rows` of mapped ones; for f16 no encoder."""
    side, _, rows = side.partition("+")
    own = launch_triton.module(name)
    if own.KEY_AXIS == "plain":
        fixed = {"KEYS": side == "key", "TAIL": own.level, "D": int(d)}
        return made(gather_pages, fixed, target, True)
    fixed = launch_triton.encoder(name, side, int(d), mapped=bool(rows))
    return made(encode_pages, fixed, target, False)


def matvec(name: str, rows: str, d: str, target: str) -> Any:
    """The products with one to three weights, q4_k+q6_k, for so many rows, after a norm."""
    types = name.split("+")
    fixed = launch_triton.product(types, [4096] * len(types), 4096, int(rows), False)
    fixed |= {"ADD": len(types) == 1, "NORM": True}
    return made(matvec_triton.matvec, fixed, target, True)


def gated(name: str, rows: str, d: str, target: str) -> Any:
    """The gated product with two weights."""
    fixed = launch_triton.gated_product(tuple(name.split("+")), 4096, 4096, int(rows), False)
    fixed |= {"NORM": True, "act": elementwise_triton.silu}
    return made(matvec_triton.matvec_gated, fixed, target, True)


def panel(name: str, kind: str, d: str, target: str) -> Any:
    """A weight's rows to f16 or f32."""
    fixed = launch_triton.panel_sizes(name, 4096, 4096, False)
    fixed |= {"LISTED": kind == "f32", "CHECKED": kind == "f16"}
    return made(matvec_triton.decode_rows, fixed, target, True, out={"f16": "*fp16"}.get(kind))


def write(key: str, value: str, d: str, target: str) -> Any:
    """RoPE and the tail's keys and values, for decoding."""
    n = int(d)
    fixed = write_triton.tail(n, n, (key, value), 1)
    fixed |= {"Q_ROT": n, "K_ROT": n, "NEOX": True, "KEPT": False}
    return made(write_triton.write_tail, fixed, target, True)


def norm(_: str, add: str, d: str, target: str) -> Any:
    """An RMS norm of rows of d values."""
    width = launch_triton.upto(int(d))
    fixed = {"ROWS": max(1, 1024 // width), "WIDTH": width, "ADD": add == "add"}
    return made(elementwise_triton.normalise, fixed, target, True)


def each(name: str, _: str, d: str, target: str) -> Any:
    """An elementwise function."""
    fixed = {"BLOCK": 1024, "PAIRED": True, "what": getattr(elementwise_triton, name)}
    return made(elementwise_triton.elementwise, fixed, target, True)


def chosen(
    types: tuple[str, str], prompt: bool, fixed: dict[str, Any], target: str
) -> dict[str, int]:
    """The launcher's options for attention."""
    turned, nvidia = fixed["N_ROT"] > 0, target.startswith("sm_")
    return launch_triton.options(types, fixed, prompt, SHARED[target], turned, nvidia)


def made(
    kernel: Any, fixed: dict[str, Any], target: str, fuse: bool, out: str | None = None
) -> Any:
    """The compiled kernel; `out` is what that argument points to, if not f32."""
    names = kernel.arg_names
    options = {"enable_fp_fusion": fuse}
    names_of = {"num_warps", "num_stages", "maxnreg"} & fixed.keys()
    options |= {name: fixed.pop(name) for name in names_of}
    kinds = {
        n: "constexpr" if n in fixed else POINTERS.get(n, "fp32" if n in FLOATS else "i32")
        for n in names
    }
    if out is not None:
        kinds["out"] = out
    whole = {*POINTERS, "n_in"}  # addresses, and counts that are multiples of 16
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if n in whole and n not in fixed}  # fmt: skip
    source = ASTSource(kernel, kinds, fixed, aligned)
    return triton.compile(source, target=target_of(target), options=options)


KERNELS = {
    "attend": attend, "prompt": prompt, "combine": combined, "encode": encode, "sums": sums,
    "decode": decode, "matvec": matvec,
    "gated": gated, "panel": panel, "write": write, "norm": norm, "each": each,
}  # fmt: skip


def compiled(what: str, d: str, pair: str, target: str) -> dict[str, object]:
    """What the compiler says of one kernel, and the CPU's seconds."""
    before = spent()
    kernel = KERNELS[what](*pair.split("/", 1), d, target)
    found = {"what": what, "pair": pair, "d": d, "target": target, "shared": kernel.metadata.shared}
    if target.startswith("sm_"):
        found |= usage(kernel.asm["cubin"])
        found["wide_loads"] = len(WIDE.findall(kernel.asm["ptx"]))
        found["narrow_loads"] = len(NARROW.findall(kernel.asm["ptx"]))
    else:
        # of registers that a wave has; a spill here is told, and no more
        said = re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", kernel.asm["amdgcn"])
        found |= {name: int(n) for name, n in said}
        found["wide_loads"] = len(
            re.findall(r"(?:global|buffer)_load_dwordx4", kernel.asm["amdgcn"])
        )
    return found | {"seconds": round(spent() - before, 1)}


def spent() -> float:
    """Seconds that this process and the programs that it called took of a CPU."""
    return sum(os.times()[:4])


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack frame, which are what it spills to memory.

    LOCAL is what PTX declares, and Triton declares nothing; spills are on the stack only.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", said)[1]),
        "spilled": int(re.search(r"STACK:(\d+)", said)[1]),
    }


if __name__ == "__main__":
    for spec in sys.argv[1:]:
        what, pair, width, where = spec.split("@")
        print(json.dumps(compiled(what, width, pair, where)), flush=True)
    sys.exit(os.EX_OK)
