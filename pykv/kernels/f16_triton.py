"""f16 cache pages for the GPU, whose tiles are in plain_triton.py."""

from __future__ import annotations

import triton.language as tl

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 16, "plain", "plain", 0
level = tl.float16
