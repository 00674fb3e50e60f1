"""Compile a small kernel of a test, and call it."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

import numpy as np

from pykv.backends.program import word
from pykv.kernels import jit_numba


def launch(template, *parameters, tasks=1, tag="", **names):
    """Run `template` for each task; arrays are handed over by address.

    Numba's cache does not see a change in a test file, so its hash is part of the kernel's name.
    """
    file = Path(template.__code__.co_filename)
    version = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    kernel = jit_numba.kernel(template, f"test_{template.__name__}{tag}_{version}", **names)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)
    ctx = np.array([word(p) for p in parameters], np.int64)
    for task in range(tasks):
        call(ctx.ctypes.data, task, 0)
