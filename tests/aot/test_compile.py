"""The GPU's kernels are compiled for real targets, with no GPU here."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")

from aot_kernels import BY_16_BYTES, EITHER_SIDE, PAIRS, TARGETS, USUAL, WIDTHS, Compilation  # noqa: E402

from pykv.cache.layout import cache_types  # noqa: E402

SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}  # bytes of a block
ENCODERS = (
    "q8_0/key", "q4_0/value", "kivi2/key", "kivi2/value+rows", "iq4_nl/key+rows",
    "tq4/key", "nuq4:outliers=1%/key+rows", "nuq4:outliers=1%/value", "f16/key",
)  # fmt: skip
WEIGHTS = (
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k",
    "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
)  # fmt: skip
BETWEEN = (
    "matvec@q4_0/1@0", "matvec@q4_k+q4_k+q6_k/1@0", "gated@q4_k+q4_k/8@0", "panel@q6_k/f16@0",
    "write@f16/f16@128", "norm@rms/add@4096", "each@gelu_gate/x@0",
)  # fmt: skip
# bytes that a kernel spills, by its name
KNOWN = {f"{kind}@nuq4:outliers=1%/nuq4@128@sm_80": 16 for kind in ("attend", "prompt")}
COLUMNS = ("registers", "vgpr_count", "shared", "spilled", "vgpr_spill_count", "wide_loads",
           "narrow_loads", "seconds")  # fmt: skip


def compiled(specs, folder):
    """What the compiler says of each kernel; two processes share the work."""
    running = Compilation(specs, folder)
    try:
        return checked(running.result())
    finally:
        running.stop()


def checked(found):
    """Print a table of kernels; none spills on NVIDIA's, and all fit a block's shared memory.

    But those of KNOWN, which may spill no more than is said there.
    """
    print("\n" + "\n".join(row(each) for each in sorted(found, key=str)))
    for each in found:
        assert each.get("spilled", 0) <= KNOWN.get(name_of(each), 0), each
        assert each["shared"] <= SHARED[each["target"]], each
    return found


def name_of(each):
    """A kernel's, as the script takes it."""
    return "@".join(str(each[k]) for k in ("what", "pair", "d", "target"))


def row(each):
    """A line of the table."""
    numbers = (f"{column} {each[column]:>6}" for column in COLUMNS if column in each)
    return f"{name_of(each):<40} " + "  ".join(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_format_on_either_side_and_the_usual_pairs(target, tmp_path):
    compiled([each for each in EITHER_SIDE + USUAL if each.endswith(target)], tmp_path)


def test_some_formats_on_either_side_and_usual_pairs(of_every_run):
    assert {each["target"] for each in checked(of_every_run)} == set(TARGETS)


@pytest.mark.parametrize("name", BY_16_BYTES)
def test_pages_are_loaded_by_16_bytes(name, of_every_run):
    of_pair = {each["pair"]: each for each in of_every_run
               if (each["d"], each["target"]) == ("128", "sm_90")}  # fmt: skip
    tails = of_pair["f16/f16"]["wide_loads"]  # a kernel for nothing but sinks and tail
    # 128 threads load 64 x 128 codes of so many bits by 16 bytes: every other bit is a load
    codes = {"q8_0": 8, "q4_0": 4, "kivi2": 2}[name] // 2
    for pair in (f"{name}/f16", f"f16/{name}"):
        # the other side is f16's 16 bits; pages are also loaded before the loop begins
        assert of_pair[pair]["wide_loads"] - tails >= 2 * (codes + 8)
        assert of_pair[pair]["narrow_loads"] == 0


def test_a_prompt_and_the_usual_encoders(tmp_path):
    encoders = [f"encode@{name}@128@sm_90" for name in ENCODERS]
    encoders += [f"encode@{name}@128@gfx942" for name in ENCODERS[-3:]]
    compiled(["prompt@q4_0/q4_0@64@sm_90", *encoders], tmp_path)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_products_and_what_lies_between_them(target, tmp_path):
    compiled([f"{kind}@{target}" for kind in BETWEEN], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_products_with_every_weight_type(target, tmp_path):
    rows = [f"matvec@{name}/{n}@0@{target}" for name in WEIGHTS for n in (1, 2, 4, 8)]
    gated = [f"gated@{name}+{name}/{n}@0@{target}" for name in WEIGHTS for n in (1, 8)]
    panels = [f"panel@{name}/{kind}@0@{target}" for name in WEIGHTS for kind in ("f16", "f32")]
    compiled([*rows, *gated, *panels], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_norms_and_writes_of_every_width(target, tmp_path):
    widths = (64, 80, 128, 256)
    tails = [f"write@{t}@{d}@{target}" for t in ("f16/f16", "bf16/f32") for d in widths]
    norms = [f"norm@rms/{add}@{d}@{target}" for add in ("add", "no") for d in (64, 2304, 8192)]
    each = ("sum_of", "scaled", "capped", "silu_gate", "gelu_gate")
    compiled([*tails, *norms, *(f"each@{e}/x@0@{target}" for e in each)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_encoder(target, d, tmp_path):
    kept = [f"nuq{bits}:outliers={share}%" for bits in (2, 3, 4) for share in (1, 25)]
    sides = [f"{name}/{side}" for name in (*cache_types(), *kept) for side in ("key", "value")]
    sides += [f"{name}+rows" for name in sides[::3]]
    found = compiled([f"encode@{name}@{d}@{target}" for name in sides], tmp_path)
    assert max(each["shared"] for each in found) <= SHARED["gfx942"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_prompts_of_the_usual_pairs(target, tmp_path):
    usual = [each for each in USUAL if each.endswith(target)]
    compiled([each.replace("attend", "prompt") for each in usual], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("d", WIDTHS)
def test_every_pair_of_formats(target, d, tmp_path):
    pairs = [f"{key}/{value}" for key in cache_types() for value in cache_types()]
    compiled([f"attend@{pair}@{d}@{target}" for pair in pairs], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_other_widths_operands_and_maps(target, tmp_path):
    what = [
        *(f"attend@{pair}@{d}@{target}" for pair in PAIRS[:2] for d in (32, 80, 112, 192)),
        *(f"{kind}@f16/f16,group=16@576/512@{target}" for kind in ("attend", "prompt")),
        f"attend@q8_0/q8_0,group=16@576/512@{target}",
        f"attend@q4_0/q4_0,operand=bf16@128@{target}",
        f"attend@q4_0/q4_0,operand=f32@128@{target}",
        f"attend@q4_0/q8_0,pages=80/48@80@{target}",
    ]
    compiled(what, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_keys_that_are_turned_and_outliers(target, tmp_path):
    kinds = ("attend", "prompt")
    compiled(
        [f"{k}@nuq4:outliers=1%/nuq4@{d}@{target}" for d in (64, 128) for k in kinds], tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_policies_need(target, tmp_path):
    pairs = ("f16/f16", *PAIRS)
    what = [f"attend@{pair},kept@{d}@{target}" for pair in pairs for d in (64, 128)]
    what += [f"sums@{pair}@{d}@{target}" for pair in pairs for d in (64, 128)]
    what += [f"{kind}@nuq4/nuq4{more}@128@{target}" for kind, more in (("attend", ",kept"),
                                                                      ("sums", ""))]  # fmt: skip
    kinds = (*cache_types(), "nuq4:outliers=1%")
    what += [f"decode@{name}/{side}@128@{target}" for name in kinds for side in ("key", "value")]
    compiled(what, tmp_path)
