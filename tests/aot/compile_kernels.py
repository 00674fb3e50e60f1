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
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pykv.kernels import launch_triton, matvec_triton
from pykv.kernels.attention_triton import attend_prompt, attend_rows
from pykv.kernels.encode_triton import encode_pages, gather_pages

GROUP, SPLITS, QUERIES = 4, 16, 16
POINTERS = {
    "pool": "*u8", "records": "*i64", "rows": "*i32", "moves": "*i64", "w": "*u8",
    **dict.fromkeys(
        ("q", "q_pages", "partial", "stats", "extra_k", "extra_v", "extra", "x", "out", "out_pages",
         "add", "table", "mapped", "offset_cos", "offset_sin", "start_cos", "start_sin"), "*fp32",
    ),
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
WIDE = re.compile(
    r"ld\.global[.\w]*\.v4\.b32|cp\.async\.c[ag]\S* \[[^\]]*\], \[[^\]]*\], 0x10|cp\.async\.cg"
)


def attention(key: str, value: str, d: int) -> dict[str, Any]:
    """Compile-time parameters; keys that nuq encodes are turned where they are read."""
    turned = d if launch_triton.module(key).KEY_AXIS == "range" else 0
    return launch_triton.attention((key, value), (d, d), n_rot=turned)


def target_of(name: str) -> GPUTarget:
    """sm_90 and its like, or gfx942."""
    return GPUTarget("cuda", int(name[3:]), 32) if name[:3] == "sm_" else GPUTarget("hip", name, 64)


def attend(key: str, value: str, d: int, target: str) -> Any:
    """The decode kernel for a pair of types."""
    counts = {"GROUP": GROUP, "TILE": launch_triton.LEAST_DOT, "SPLITS": SPLITS}
    # attention may fuse a product and a sum; encoders may not
    return made(attend_rows, attention(key, value, d) | counts, target, True)


def prompt(key: str, value: str, d: int, target: str) -> Any:
    """The prompt kernel for a pair of types."""
    counts = {"GROUP": GROUP, "QUERIES": QUERIES, "LINES": QUERIES * GROUP}
    return made(attend_prompt, attention(key, value, d) | counts, target, True)


def encode(name: str, side: str, d: int, target: str) -> Any:
    """The encoder of a type's keys or values, `key+rows` of mapped ones; for f16 no encoder."""
    side, _, rows = side.partition("+")
    own = launch_triton.module(name)
    if own.KEY_AXIS == "plain":
        fixed = {"KEYS": side == "key", "TAIL": own.level, "D": d}
        return made(gather_pages, fixed, target, True)
    fixed = launch_triton.encoder(name, side, d, mapped=bool(rows))
    return made(encode_pages, fixed, target, False)


def matvec(name: str, rows: str, d: int, target: str) -> Any:
    """The product with a weight type's blocks, for so many rows; d is not used."""
    fixed = launch_triton.product(name, int(rows), add=False)
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
