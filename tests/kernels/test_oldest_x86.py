"""Cache, attention and elementwise kernels where LLVM has no half floats and no AVX.

Without F16C, LLVM's own half conversions would end the process.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pykv.kernels import jit_numba

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import numpy as np
import test_simd
from verbs import BackendOracle, result
from pykv.backends import cpu, reference
from pykv.backends.base import LayerShape, Rope
from pykv.config import CacheConfig
from pykv.kernels import jit_numba

backend = cpu.create(threads=1, kernel_cache=Path(sys.argv[1]))
test_simd.test_every_half_widens("oldest")
test_simd.test_narrowing_rounds_to_nearest_even("oldest")
print("halves")

# a table, five bits, and halves in the tail
shapes = [LayerShape(2, 1, 40, 33)]
o = BackendOracle(CacheConfig("iq4_nl", "q5_1", 4, 0), shapes, 500, 0, backend)
backend.prepare(shapes, o.store.formats)
a = o.new()
for n in (100, 1, 40, 2):
    o.write({a: o.tokens(n)})
o.check()
print("attention")

rng = np.random.default_rng(0)
x, y = (rng.normal(0, 2, (9, 80)).astype(np.float32) for _ in range(2))
for verb in (
    lambda d, s, x, y: d.swiglu(x, y),
    lambda d, s, x, y: d.geglu(x, y),
    lambda d, s, x, y: d.softcap(d.add(x, y), 3.0),
    lambda d, s, x, y: d.rms_norm(x, y[0] if isinstance(y, np.ndarray) else y.array[0], 1e-5),
):
    got, expected = (result(d, verb, x, y) for d in (backend, reference.create()))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)
print("elementwise")
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="an x86 CPU is needed")
def test_kernels_run_and_agree_on_the_oldest_x86(request):
    tests = Path(__file__).parents[1]
    folders = [str(tests / name) for name in ("kernels", "backends", "cache")]
    root = str(Path(jit_numba.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, request.config.cache.mkdir("pykv"), *folders],
        env={
            **os.environ,
            "NUMBA_CPU_NAME": "x86-64",
            "NUMBA_CPU_FEATURES": "",
            "PYTHONPATH": os.pathsep.join([root, *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["halves", "attention", "elementwise"]
