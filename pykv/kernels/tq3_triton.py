"""tq3 cache pages for the GPU: layout in formats/tq3.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.formats import tq3

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 3, "token", "token", 1

LEVELS = tq3.FORMAT.levels  # for `extra`


@triton.jit
def level(code, extra):
    """The level, from the format's table."""
    return tl.load(extra + code)
