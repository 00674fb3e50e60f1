"""Compiled test kernels lie in pytest's cache folder, not in the user's.

The product's own kernels are kept in the user's, where the other tests' processes find them.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@contextmanager
def _kept_in(root):
    from pykv.kernels import jit_numba

    before = jit_numba.cache_folder()
    jit_numba.set_cache_folder(root)
    yield
    jit_numba.set_cache_folder(before.parent.parent)


@pytest.fixture(scope="module")
def users_folder():
    """The user's cache folder."""
    from pykv.kernels import jit_numba

    return jit_numba.cache_folder().parent.parent


@pytest.fixture(autouse=True, scope="module")
def _kernel_folder(request, users_folder):
    with _kept_in(request.config.cache.mkdir("pykv")):
        yield


@pytest.fixture(scope="module")
def driver(users_folder, _kernel_folder):
    """What runs kernels: the product's."""
    from pykv.backends.kernels import Kernels

    with _kept_in(users_folder):
        return Kernels().driver
