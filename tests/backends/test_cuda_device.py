"""What is said where there is no GPU, or one that fails."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from verbs import Run  # noqa: E402

from pykv.backends import cuda, cuda_device  # noqa: E402
from pykv.config import CacheConfig  # noqa: E402
from pykv.errors import DeviceError, NumericsError, OutOfMemoryError  # noqa: E402
from pykv.kernels import jit_triton  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might be"),
        triton.OutOfResources(300000, 232448, "shared memory"),
        subprocess.CalledProcessError(1, ["gcc", "driver.c"]),
        PermissionError(13, "Permission denied", "/root/.triton"),
    ],
)
def test_a_failure_is_one_sentence(error):
    expected = pytest.raises(DeviceError, match="^the GPU failed: .+; start pykv again")
    with expected as found, cuda_device.told(CPU, "use less"):
        raise error
    assert "\n" not in str(found.value)
    assert found.value.__cause__ is error


def test_full_memory_says_what_to_do():
    expected = pytest.raises(OutOfMemoryError, match="is full; use less .Tried to allocate 9 GiB")
    with expected, cuda_device.told(CPU, "use less"):
        raise torch.cuda.OutOfMemoryError("Tried to allocate 9 GiB. GPU 0 has\nmore text")


def test_errors_of_pykv_stay_as_they_are():
    with pytest.raises(NumericsError, match="^layer 3$"), cuda_device.told(CPU, "use less"):
        raise NumericsError("layer 3")


def test_a_run_that_fails_says_so_and_the_next_one_goes_on(monkeypatch):
    run = Run(cuda.create(device="cpu"), CacheConfig())
    first = run.read(np.arange(3))
    with monkeypatch.context() as patch:
        patch.setattr(run.graph, "forward", lambda step: torch.zeros(2) @ torch.zeros(3))
        with pytest.raises(DeviceError, match="the GPU failed: "):
            run.read(np.arange(2))
    run.store.free(run.sequence)
    run.sequence = run.store.new_sequence()
    np.testing.assert_array_equal(run.read(np.arange(3)), first)


@pytest.fixture
def gpu(monkeypatch):
    """torch says that there is a GPU, for which Triton can launch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GeForce")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(jit_triton, "trouble", lambda: None)

    def capability(*found):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)

    capability(9, 0)
    return capability


def test_a_gpu_that_can_be_used(gpu):
    assert cuda.missing() is None


def test_an_old_gpu_is_not_used(gpu):
    gpu(7, 5)
    assert cuda.missing() == "GeForce has compute capability 7.5, and 8.0 or more is needed"


def test_a_process_that_cannot_use_it_says_why(gpu, monkeypatch):
    def forked():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_capability", forked)
    assert cuda.missing() == (
        "torch cannot use it: Cannot re-initialize CUDA in forked subprocess. To use"
    )


def test_without_what_launches_it_is_not_used(gpu, monkeypatch):
    monkeypatch.setattr(jit_triton, "trouble", lambda: RuntimeError("Failed to find C compiler."))
    assert cuda.missing() == "Triton cannot use it: Failed to find C compiler"


def test_trouble_is_what_the_driver_raises():
    # no GPU is here, or the process has Triton's interpreter
    found = jit_triton.trouble()
    assert found is None or isinstance(found, jit_triton.ERRORS)
