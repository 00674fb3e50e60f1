"""Functions that the GPU's kernels call."""

from __future__ import annotations

import subprocess
from functools import cache
from typing import Any

import triton

# said at each launch: Triton 3.9 fuses products and sums unless told otherwise, but warns, and 3.10
# does not
FUSED = {"enable_fp_fusion": True}
# what compiling and launching raise: the compiler, the driver, the C compiler and the cache's files
ERRORS = (RuntimeError, triton.TritonError, subprocess.SubprocessError, OSError)


def device(function: Any) -> Any:
    """`triton.jit` for what kernels call and nobody launches.

    Triton's interpreter prepares the language anew for each call of a jitted function, which takes
    a millisecond or two. The kernel's launch has done so already, so that there the bare function
    will do.
    """
    jitted = triton.jit(function)
    return jitted if isinstance(jitted, triton.JITFunction) else jitted.rewrite()


@cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where a program costs about a millisecond."""
    return not isinstance(triton.jit(device), triton.JITFunction)


def trouble() -> Exception | None:
    """Why nothing can be launched here, or None; what launches is built by a C compiler, once."""
    try:
        triton.runtime.driver.active.get_current_device()
    except ERRORS as error:
        return error
    return None
