"""Compiled test kernels lie in pytest's cache folder, not in the user's."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _kernel_folder(request):
    from pykv.kernels import jit_numba

    before = jit_numba.cache_folder()
    jit_numba.set_cache_folder(request.config.cache.mkdir("pykv"))
    yield
    jit_numba.set_cache_folder(before.parent.parent)
