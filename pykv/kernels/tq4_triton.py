"""tq4 cache pages for the GPU: layout in formats/tq4.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.formats import tq4

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "token", "token", 1

LEVELS = tq4.FORMAT.levels  # for `extra`


@triton.jit
def level(code, extra):
    """The level, from the format's table."""
    return tl.load(extra + code)
