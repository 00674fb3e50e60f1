"""The GPU itself: whether there is one that can be used, and what its failures are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from pykv.errors import DeviceError, OutOfMemoryError
from pykv.kernels import jit_triton

OLDEST = (8, 0)  # compute capability that Triton makes code for


def missing() -> str | None:
    """Why no GPU can be used, or None."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return (
                "the torch that is installed is built for the CPU; uninstall it, and install the "
                "one for your GPU as pytorch.org says"
            )
        return "torch finds none; look at the driver (nvidia-smi or rocm-smi)"
    try:
        found = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
    except RuntimeError as error:  # a process that was forked, a driver that is out of order
        return f"torch cannot use it: {_line(error)}"
    if torch.version.hip is None and found < OLDEST:
        return (
            f"{name} has compute capability {found[0]}.{found[1]}, and {OLDEST[0]}.{OLDEST[1]} or "
            "more is needed"
        )
    trouble = jit_triton.trouble()
    return f"Triton cannot use it: {_line(trouble)}" if trouble is not None else None


def device_of(name: str) -> torch.device:
    """A device by name; `cuda` is the GPU that is current now, and stays it."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def told(device: torch.device, advice: str) -> Iterator[None]:
    """Run a block on the device; what torch and Triton raise there becomes an error of pykv.

    `advice`: what to do where memory is short.  Raises OutOfMemoryError, DeviceError.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the GPU's memory is full; {advice} ({_line(error)})") from error
    except jit_triton.ERRORS as error:
        raise DeviceError(
            f"the GPU failed: {_line(error)}; start pykv again, and if that does not help, use "
            "--device cpu and report it as an issue of pykv"
        ) from error


def wait(device: torch.device) -> None:
    """Until nothing runs there any more; a device that has failed is not waited for."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Give memory that no tensor holds back to the driver, whose figures count it as used."""
    if device.type == "cuda":
        with suppress(RuntimeError), torch.cuda.device(device):
            torch.cuda.empty_cache()


def _line(error: BaseException) -> str:
    """An error's first line, which says what it is; torch's and Triton's go on for pages."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
