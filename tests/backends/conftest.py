"""Backends for the tests of this folder; their helper modules lie here and beside the store's."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cache")]


@pytest.fixture(scope="session")
def kernels():
    from pykv.backends.kernels import Kernels

    return Kernels()


@pytest.fixture
def make_cpu(kernels, monkeypatch):
    """A function that gives CPU backends which share their loaded kernels."""
    from pykv.backends import cpu

    monkeypatch.setattr(cpu, "Kernels", lambda *args: kernels)
    made = []

    def make(threads=2, **settings):
        made.append(cpu.CpuBackend(threads=threads, **settings))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
