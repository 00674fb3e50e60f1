"""iq4_nl cache pages for the GPU: layout in formats/iq4_nl.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.formats import iq4_nl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "block", "block", 1

LEVELS = iq4_nl.TABLE  # for `extra`


@triton.jit
def level(code, extra):
    """The step, from the table."""
    return tl.load(extra + code)
