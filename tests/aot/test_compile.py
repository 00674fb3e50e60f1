"""The GPU's kernels are compiled for real targets, with no GPU here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pykv.cache.layout import cache_types

pytest.importorskip("triton", reason="the GPU's compiler is not installed")

SCRIPT = Path(__file__).parent / "compile_kernels.py"
PAIRS = ("q8_0/q8_0", "q4_0/q4_0", "kivi2/kivi2", "kivi4/kivi2")
FEW = {"sm_90": ("q4_0/q4_0", "kivi2/q8_0"), "gfx942": ("q4_0/q4_0",)}  # in every run
ENCODERS = (
    "q8_0/key", "q4_0/key", "q4_0/value", "kivi2/key", "kivi2/value+rows", "iq4_nl/key+rows",
    "tq4/key", "nuq4:outliers=1%/key+rows", "nuq4:outliers=1%/value", "f16/key",
)  # fmt: skip
LEAST_SHARED = 65536  # bytes of shared memory that a program may have on gfx942
WEIGHTS = (
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k",
    "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
)  # fmt: skip
BETWEEN = (
    "matvec@q4_0/1@0", "matvec@q4_k+q4_k+q6_k/1@0", "gated@q4_k+q4_k/8@0", "panel@q6_k/f16@0",
    "write@f16/f16@128", "norm@rms/add@4096", "each@gelu_gate/x@0",
)  # fmt: skip
EVERY = [*(f"{t}/f16" for t in cache_types()), *(f"f16/{t}" for t in cache_types() if t != "f16")]


def compiled(specs, folder):
    """What the compiler says of each kernel; kernels of other runs are not reused."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *specs], capture_output=True, text=True, check=False,
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(specs)
    for each in found:
        print(each)
        assert each.get("spilled", 0) == 0
    return found


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_usual_pairs(target, tmp_path):
    found = compiled([f"attend@{pair}@128@{target}" for pair in FEW[target]], tmp_path)
    if target == "sm_90":
        # codes of a page: 16 bytes at a time, by 128 threads; scales may be narrower
        assert all(each["wide_loads"] >= 16 for each in found)


def test_a_prompt_and_the_usual_encoders(tmp_path):
    encoders = [f"encode@{name}@128@sm_90" for name in ENCODERS]
    encoders += [f"encode@{name}@128@gfx942" for name in ENCODERS[-3:]]
    compiled(["prompt@q4_0/q4_0@64@sm_90", *encoders], tmp_path)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_products_and_what_lies_between_them(target, tmp_path):
    compiled([f"{kind}@{target}" for kind in BETWEEN], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_products_with_every_weight_type(target, tmp_path):
    rows = [f"matvec@{name}/{n}@0@{target}" for name in WEIGHTS for n in (1, 2, 4, 8)]
    gated = [f"gated@{name}+{name}/{n}@0@{target}" for name in WEIGHTS for n in (1, 8)]
    panels = [f"panel@{name}/{kind}@0@{target}" for name in WEIGHTS for kind in ("f16", "f32")]
    compiled([*rows, *gated, *panels], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_norms_and_writes_of_every_width(target, tmp_path):
    widths = (64, 80, 128, 256)
    tails = [f"write@{t}@{d}@{target}" for t in ("f16/f16", "bf16/f32") for d in widths]
    turns = [f"rope@{style}/q@{d}@{target}" for style in ("neox", "pairs") for d in widths]
    norms = [f"norm@rms/{add}@{d}@{target}" for add in ("add", "no") for d in (64, 2304, 8192)]
    each = ("sum_of", "scaled", "capped", "silu_gate", "gelu_gate")
    compiled([*tails, *turns, *norms, *(f"each@{e}/x@0@{target}" for e in each)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_encoder(target, d, tmp_path):
    kept = [f"nuq{bits}:outliers={share}%" for bits in (2, 3, 4) for share in (1, 25)]
    sides = [f"{name}/{side}" for name in (*cache_types(), *kept) for side in ("key", "value")]
    sides += [f"{name}+rows" for name in sides[::3]]
    found = compiled([f"encode@{name}@{d}@{target}" for name in sides], tmp_path)
    assert max(each["shared"] for each in found) <= LEAST_SHARED


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_format_on_either_side(target, tmp_path):
    compiled([f"attend@{pair}@128@{target}" for pair in EVERY], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_the_usual_pairs_at_every_width(target, d, tmp_path):
    kinds = ("attend", "prompt")
    compiled([f"{kind}@{pair}@{d}@{target}" for pair in PAIRS for kind in kinds], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_keys_that_are_turned_and_outliers(target, tmp_path):
    compiled([f"attend@nuq4:outliers=1%/nuq4@{d}@{target}" for d in (64, 128)], tmp_path)
