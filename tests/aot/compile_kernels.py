"""Compiles kernels for GPUs that need not be here; prints one JSON object each.

A program of its own, since the tests' process has Triton's interpreter:
    python compile_kernels.py attend@q4_0/f16@128@sm_90 encode@kivi2/key@64@gfx942 ...
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pykv.formats.coded import find
from pykv.kernels import matvec_triton
from pykv.kernels.attention_triton import attend_prompt, attend_rows
from pykv.kernels.encode_triton import encode_pages

GROUP, TILE, SPLITS = 4, 16, 16
POINTERS = {
    "pool": "*u8", "records": "*i64", "rows": "*i32", "moves": "*i64", "w": "*u8",
    **dict.fromkeys(
        ("q", "q_pages", "partial", "stats", "extra_k", "extra_v", "extra", "x", "out", "out_pages",
         "add", "table", "offset_cos", "offset_sin", "start_cos", "start_sin"), "*fp32",
    ),
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
WIDE = re.compile(
    r"ld\.global[.\w]*\.v4\.b32|cp\.async\.c[ag]\S* \[[^\]]*\], \[[^\]]*\], 0x10|cp\.async\.cg"
)


def upto(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def constants(key: str, value: str, d: int) -> dict[str, object]:
    """The compile-time parameters."""
    k, v = (import_module(f"pykv.kernels.{name.partition(':')[0]}_triton") for name in (key, value))
    outliers = [getattr(find(name), "n_outliers", lambda d: 0)(d) for name in (key, value)]
    padded = (d + 31) // 32 * 32
    return {
        "GROUP": GROUP, "TILE": TILE, "SPLITS": SPLITS, "D_K": d, "D_V": d, "WIDTH_K": upto(d),
        "WIDTH_V": upto(padded), "PAGE_K": d, "PAGE_V": d, "PAGE_WIDTH_K": upto(d),
        "PAGE_WIDTH_V": upto(padded), "MAPPED": False, "ENCODED": (key, value) != ("f16", "f16"),
        "OPERAND": tl.float16, "TAIL_K": tl.float16, "TAIL_V": tl.float16,
        "K_BITS": k.BITS, "K_AXIS": k.KEY_AXIS, "K_PARAMETERS": k.PARAMETERS, "k_level": k.level,
        "V_BITS": v.BITS, "V_AXIS": v.VALUE_AXIS, "V_PARAMETERS": v.PARAMETERS, "v_level": v.level,
        "N_ROT": d if k.KEY_AXIS == "range" else 0, "NEOX": False,
        "K_OUTLIERS": outliers[0], "K_PLACES": max(16, upto(outliers[0])),
        "V_OUTLIERS": outliers[1], "V_PLACES": max(16, upto(outliers[1])),
    }  # fmt: skip


def target_of(name: str) -> GPUTarget:
    """sm_90 and its like, or gfx942."""
    return GPUTarget("cuda", int(name[3:]), 32) if name[:3] == "sm_" else GPUTarget("hip", name, 64)


def attend(key: str, value: str, d: int, target: str) -> Any:
    """The decode kernel for a pair of types."""
    # attention may fuse a product and a sum; encoders may not
    return made(attend_rows, constants(key, value, d), target, True)


def prompt(key: str, value: str, d: int, target: str) -> Any:
    """The prompt kernel for a pair of types."""
    fixed = {k: v for k, v in constants(key, value, d).items() if k not in ("TILE", "SPLITS")}
    return made(attend_prompt, fixed | {"QUERIES": 16, "LINES": 16 * GROUP}, target, True)


def encode(name: str, side: str, d: int, target: str) -> Any:
    """The encoder of a type's keys or values."""
    module, padded = import_module(f"pykv.kernels.{name}_triton"), (d + 31) // 32 * 32
    fixed = {
        "KEYS": side == "key", "TAIL": tl.float16, "D": d,
        "WIDTH": upto(d if side == "key" else padded), "BITS": module.BITS,
        "AXIS": module.KEY_AXIS if side == "key" else module.VALUE_AXIS,
        "PARAMETERS": module.PARAMETERS, "fit": module.fit, "code": module.code,
    }  # fmt: skip
    return made(encode_pages, fixed, target, False)


def matvec(name: str, rows: str, d: int, target: str) -> Any:
    """The product with a weight type's blocks, for so many rows; d is not used."""
    module, n = import_module(f"pykv.kernels.{name}_triton"), int(rows)
    fixed = {
        "BLOCK_LEN": module.BLOCK_LEN, "BLOCK_BYTES": module.BLOCK_BYTES, "ROWS": 4,
        "STEP": max(1, 256 // module.BLOCK_LEN), "X_ROWS": n, "X_TILE": upto(n), "ADD": False,
        "weight": module.weight,
    }  # fmt: skip
    return made(matvec_triton.matvec, fixed, target, True)


def made(kernel: Any, fixed: dict[str, object], target: str, fuse: bool) -> Any:
    """The compiled kernel."""
    names = kernel.arg_names
    kinds = {
        n: "constexpr" if n in fixed else POINTERS.get(n, "fp32" if n == "scale" else "i32")
        for n in names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS}
    source, options = ASTSource(kernel, kinds, fixed, aligned), {"enable_fp_fusion": fuse}
    return triton.compile(source, target=target_of(target), options=options)


def compiled(what: str, d: int, pair: str, target: str) -> dict[str, object]:
    """What the compiler says of one kernel."""
    kernel = {"attend": attend, "prompt": prompt, "encode": encode, "matvec": matvec}[what](
        *pair.split("/"), d, target
    )
    found = {"what": what, "pair": pair, "d": d, "target": target, "shared": kernel.metadata.shared}
    if target.startswith("sm_"):
        found |= usage(kernel.asm["cubin"])
        found["wide_loads"] = len(WIDE.findall(kernel.asm["ptx"]))
    return found


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills to memory."""
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
        "spilled": int(re.search(r"LOCAL:(\d+)", said)[1]),
    }


if __name__ == "__main__":
    for spec in sys.argv[1:]:
        what, pair, width, where = spec.split("@")
        print(json.dumps(compiled(what, int(width), pair, where)), flush=True)
    sys.exit(os.EX_OK)
