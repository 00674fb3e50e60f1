"""Compiled kernels are kept, found again, told apart, and made again where they are damaged."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from pykv.kernels import jit_numba
from pykv.kernels.simd_memory import (
    put_i64,
    scalar_i64,
)

ADD = 1


# ctx: x, out
def addition(ctx, task, worker):
    put_i64(ctx + 8, scalar_i64(ctx) + ADD)


def call(kernel):
    ctx = np.array([40, 0])
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)(ctx.ctypes.data, 0, 0)
    return int(ctx[1])


@pytest.fixture
def folder(tmp_path):
    """A kernel folder of the test's own."""
    before = jit_numba.cache_folder()
    jit_numba.set_cache_folder(tmp_path)
    yield jit_numba.cache_folder()
    jit_numba.set_cache_folder(before.parent.parent)


@pytest.fixture
def load(monkeypatch):
    """A function that gives what the kernel adds to 40, and whether it had to be compiled.

    Each call forgets what this process has loaded, as a new process would.
    """

    def make(amount=2, name="test_addition"):
        before = len(jit_numba.compiled.names)
        monkeypatch.setattr(jit_numba, "_loaded", {})
        result = call(jit_numba.kernel(addition, name, ADD=amount))
        return result, len(jit_numba.compiled.names) - before

    return make


def test_a_kernel_is_compiled_once_and_names_tell_bindings_apart(folder, load):
    assert load(2, "test_add_2") == (42, 1)
    assert load(5, "test_add_5") == (45, 1)
    assert load(2, "test_add_2") == (42, 0)
    assert load(5, "test_add_5") == (45, 0)
    assert {f.suffix for f in folder.iterdir()} == {".nbi", ".nbc"}


def test_a_process_loads_a_kernel_once(folder):
    first = jit_numba.kernel(addition, "test_once", ADD=1)
    assert jit_numba.loaded("test_once") is first
    assert jit_numba.kernel(addition, "test_once", ADD=1) is first


def test_listeners_hear_of_compilations(folder, load, monkeypatch):
    heard = []
    monkeypatch.setattr(jit_numba.compiled, "listener", heard.append)
    seconds = jit_numba.compiled.seconds
    load()
    load()
    assert heard == ["test_addition"]
    assert jit_numba.compiled.seconds > seconds


def damage_nothing_left(data):
    return b""


def damage_half(data):
    return data[: len(data) // 2]


def damage_zeros(data):
    return bytes(len(data))


def damage_one_bit(data):
    i = len(data) * 2 // 3
    return data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :]


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize(
    "damage", [damage_nothing_left, damage_half, damage_zeros, damage_one_bit, None]
)
def test_a_damaged_file_costs_a_compilation_and_nothing_else(folder, load, suffix, damage):
    load()
    (file,) = folder.glob(f"*{suffix}")
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    assert load() == (42, 1)
    assert load() == (42, 0)


def test_a_folder_that_cannot_be_written(folder, load, monkeypatch):
    load(2, "test_here")

    def refuse(*args, **kwargs):
        raise PermissionError(30, "Read-only file system")

    with monkeypatch.context() as patch:  # a chmod would not stop root
        patch.setattr(os, "makedirs", refuse)
        patch.setattr(tempfile, "TemporaryFile", refuse)
        patch.setattr(os, "replace", refuse)
        assert load(2, "test_here") == (42, 0)
        assert load(3, "test_not_here") == (43, 1)
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be(tmp_path, load):
    before = jit_numba.cache_folder()
    (tmp_path / "file").write_text("no folder")
    jit_numba.set_cache_folder(tmp_path / "file")
    try:
        assert load() == (42, 1)
    finally:
        jit_numba.set_cache_folder(before.parent.parent)


def test_the_folder_changes_with_the_sources(tmp_path, monkeypatch):
    copy = tmp_path / "kernels"
    copy.mkdir()
    for file in Path(jit_numba.__file__).parent.glob("*.py"):
        (copy / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(jit_numba, "__file__", str(copy / "jit_numba.py"))
    before = jit_numba.sources_hash()
    (copy / "some_triton.py").write_text("x = 1")
    assert jit_numba.sources_hash() == before
    with (copy / "math_numba.py").open("a") as file:
        file.write("\n")
    assert jit_numba.sources_hash() != before


ANOTHER_PROCESS = """
import sys
from pathlib import Path
import numpy as np
from pykv.backends import cpu
from pykv.backends.base import LayerShape
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.kernels import jit_numba

class Graph:
    def forward(self, step):
        qkv = [backend.buffer(2, n, 32) for n in (2, 1, 1)]
        for i, x in enumerate(qkv):
            n = x.array.size
            x.array[...] = np.sin(np.arange(n) * (i + 1)).reshape(x.array.shape)
        return backend.attention(step, 0, *qkv, None, 1.0)

backend = cpu.create(threads=1, kernel_cache=Path(sys.argv[1]))
for pair in (("f32", "f16"), ("f16", "f32")):
    store = Store([LayerShape(2, 1, 32, 32)], CacheConfig(*pair), 100)
    backend.kernels.load_cache(store.shapes, store.formats)
    batch = [(store.new_sequence(), np.zeros(2, np.int32))]
    out = backend.run(Graph(), store.begin(batch, np.zeros(2, np.int32)))
    print("result", out.tobytes().hex())
print("compiled", *jit_numba.compiled.names)
"""


def in_another_process(folder):
    root = str(Path(jit_numba.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return [words[1] for words in lines if words[0] == "result"], lines[-1][1:]


def test_a_second_process_compiles_nothing_and_two_pairs_give_two_results(users_folder):
    # what lies there already was compiled by other processes
    first, _ = in_another_process(users_folder)
    second, compiled = in_another_process(users_folder)
    assert compiled == []
    assert second == first
    assert first[0] != first[1]
