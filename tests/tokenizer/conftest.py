from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path():
    return Path("/work/dev/models/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma_path():
    return Path("/work/dev/models/gemma-3-270m-q4_k_m.gguf")
