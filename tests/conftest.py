"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_configure(config):
    """Triton's functions run in its interpreter, on CPU tensors, but where a GPU is asked for.

    It looks when it is first imported.
    """
    expression = config.option.markexpr
    if "gpu" not in expression or "not gpu" in expression:
        os.environ["TRITON_INTERPRET"] = "1"


def _model(name: str) -> Path:
    from pykv.engine import hub

    entry = hub.find(name)
    path = hub.models_dir() / entry.file
    if not path.exists():
        pytest.fail(f"the model {name} is not here; run `pykv pull {name}`, as the README says")
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    return _model("gemma-3-270m")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of texts and reference values that the authors test with."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"the authors' test data is not here ({folder})")
    return folder
