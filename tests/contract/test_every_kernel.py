"""Every weight type's `unpack` in the matvec and panel kernels, with `gguf` as the outsider."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest

from pykv import registry
from pykv.kernels import jit_numba, matvec_numba

FORMATS = {n: registry.find("formats", n, "weight type").FORMAT for n in registry.names("formats")}
MODULES = {
    name: importlib.import_module(f"pykv.kernels.{name}_numba")
    for name in FORMATS
    if find_spec(f"pykv.kernels.{name}_numba") is not None
}
NAMES = [name for name, module in MODULES.items() if "unpack" in vars(module)]
BLOCKS = [name for name in NAMES if FORMATS[name].block_len > 1]
SENTINEL = np.float32(-12345)


def compiled(template, kind, name, **names):
    module = MODULES[name]
    return jit_numba.kernel(
        template,
        f"{kind}_{name}" + "".join(f"_r{n}" for n in names.values()),
        unpack=module.unpack,
        BLOCK_LEN=module.BLOCK_LEN,
        BLOCK_BYTES=module.BLOCK_BYTES,
        **names,
    )


def run(kernel, parameters, tasks):
    """Call the kernel for each task; arguments after the task number are 0."""
    n = len(jit_numba.SIGNATURE.args)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n)(kernel.address)
    ctx = np.array(parameters, np.int64)
    for task in range(tasks):
        call(ctx.ctypes.data, task, *[0] * (n - 2))


def blocks_in(name, rows):
    return rows.shape[1] // MODULES[name].BLOCK_BYTES


def panel_of(name, rows, chosen=None):
    """f32 [n_rows, width], three rows a task, with a sentinel behind each row that must survive."""
    n = len(rows) if chosen is None else len(chosen)
    width = blocks_in(name, rows) * MODULES[name].BLOCK_LEN
    out = np.full((n + 1, width + 16), SENTINEL)
    run(
        compiled(matvec_numba.panel, "panel", name),
        [
            rows.ctypes.data,
            rows.shape[1],
            blocks_in(name, rows),
            0 if chosen is None else chosen.ctypes.data,
            out.ctypes.data,
            out.strides[0],
            n,
            3,
        ],
        -(-n // 3),
    )
    assert (out[:, width:] == SENTINEL).all()
    assert (out[n] == SENTINEL).all()
    return out[:n, :width]


def products_of(name, rows, x, add=None):
    """f32 [len(x), n_rows]: x @ rows.T by the kernel for that many input rows."""
    out = np.full((len(x) + 1, len(rows)), SENTINEL)
    run(
        compiled(matvec_numba.matvec, "matvec", name, ROWS=len(x)),
        [
            rows.ctypes.data,
            rows.shape[1],
            blocks_in(name, rows),
            x.ctypes.data,
            x.strides[0],
            out.ctypes.data,
            out.strides[0],
            len(rows),
            4,
            0 if add is None else add.ctypes.data,
        ],
        -(-len(rows) // 4),
    )
    assert (out[len(x)] == SENTINEL).all()
    return out[: len(x)]


def reference(name, rows):
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])


def n_blocks(name, width):
    """Blocks of the format, not of the kernel, in a row of about that width."""
    length = max(FORMATS[name].block_len, MODULES[name].BLOCK_LEN)
    return max(width // length, 1) * length // FORMATS[name].block_len


def test_every_weight_type_has_a_kernel():
    assert set(NAMES) == {n for n, f in FORMATS.items() if "weight" in f.roles}


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_the_formats(name):
    module, format_ = MODULES[name], FORMATS[name]
    assert module.BLOCK_LEN % 32 == 0
    assert module.BLOCK_BYTES * format_.block_len == format_.block_bytes * module.BLOCK_LEN


# The panel is compared for equality (a zero's sign aside). A half float has 11 bits, a block's own
# scale at most 8, a code at most 8: the products of all three are exact in float32, or are the last
# step (q6_k), so that gguf and the kernel round once, in the same place.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [32, 288, 1024])
@pytest.mark.parametrize("extreme", [False, True])
def test_panel_is_gguf(name, width, extreme, random_rows):
    rows = random_rows(FORMATS[name], 7, n_blocks(name, width), extreme=extreme, seed=width)
    np.testing.assert_array_equal(panel_of(name, rows), reference(name, rows))


@pytest.mark.parametrize("name", BLOCKS)
def test_panel_is_gguf_for_every_code(name, every_byte):
    rows = every_byte(FORMATS[name])
    np.testing.assert_array_equal(panel_of(name, rows), reference(name, rows))


@pytest.mark.parametrize("name", NAMES)
def test_panel_of_chosen_rows(name, random_rows):
    rows = random_rows(FORMATS[name], 9, n_blocks(name, 256))
    chosen = np.array([8, 0, 3, 3], np.int32)
    np.testing.assert_array_equal(panel_of(name, rows, chosen), reference(name, rows)[chosen])


def bound(w, x):
    """How far a sum of products may be from the exact one, f64 [len(x), len(w)].

    The weights are exact (as above). A lane adds width / 32 products, each rounded once in its
    fma; then two groups are added and 16 lanes in four steps, and a bias: n roundings on the way
    of any product, so the error is below n * u / (1 - n * u) of the sum of magnitudes, u = 2**-24
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Products near 2**-149
    lose up to half of that, which is what the constant adds.
    """
    n = w.shape[1] / 32 + 6
    size = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
    return n * 2.0**-24 / (1 - n * 2.0**-24) * size + w.shape[1] * 2.0**-150


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_rows", [1, 4])
@pytest.mark.parametrize(("width", "extreme"), [(32, False), (1056, False), (512, True)])
def test_products_are_within_the_bound(name, n_rows, width, extreme, random_rows):
    rows = random_rows(FORMATS[name], 10, n_blocks(name, width), extreme=extreme, seed=width)
    w = reference(name, rows)
    x = np.random.default_rng(n_rows).standard_normal((n_rows, w.shape[1])).astype(np.float32)
    if name == "mxfp4" and extreme:
        x *= np.float32(2.0**-20)  # its weights reach 2**125
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    assert (np.abs(products_of(name, rows, x) - exact) <= bound(w, x)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_sum_whatever_it_is_computed_with(name, random_rows):
    rows = random_rows(FORMATS[name], 10, n_blocks(name, 512))
    width = reference(name, rows).shape[1]
    x = np.random.default_rng(5).standard_normal((4, width)).astype(np.float32)
    add = np.random.default_rng(6).standard_normal((4, 10)).astype(np.float32)
    together = products_of(name, rows, x, add)
    for i in range(4):
        alone = products_of(name, rows, x[i : i + 1], add[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])
    np.testing.assert_array_equal(together, products_of(name, rows, x) + add)


ON_THE_OLDEST_X86 = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import conftest, test_every_kernel as contract
contract.jit_numba.set_cache_folder(pathlib.Path(sys.argv[2]))
for name in contract.NAMES:
    contract.test_panel_is_gguf(name, 288, True, conftest._rows)
    print(name)
contract.test_products_are_within_the_bound("q4_k", 4, 1056, False, conftest._rows)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="an x86 CPU is needed")
def test_kernels_run_on_the_oldest_x86(tmp_path):
    """Without F16C, LLVM's own half conversions would end the process."""
    folder = Path(__file__).parent
    environment = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder.parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_OLDEST_X86, folder, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == NAMES
