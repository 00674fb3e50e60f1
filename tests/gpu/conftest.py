"""Tests that need a GPU: `pytest tests/gpu -m gpu`.

Without one they are skipped, or with TRITON_INTERPRET=1 run slowly in Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels")]


@pytest.fixture(scope="session")
def device() -> str:
    """What torch calls it."""
    torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")
    pytest.importorskip("triton", reason="the GPU's compiler is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return "cuda"
