"""int8: a signed byte a value, one scale per token and head; 8 + 16 / d bits a value.

Page: codes i8, then scales f16 [64 tokens];  v = s * code, s = f16(max |x| / 127).
Error: at most s / 2 a value, and what rounding s costs at the range's ends: max |x| / 2048, or
127 * 2**-25 if that is more.
Source: vLLM, vllm/v1/attention/ops/triton_reshape_and_cache_flash.py, int8_per_token_head, whose
scale is a float32; here codes are chosen with the rounded scale.
"""

from __future__ import annotations

import numpy as np

from pykv.formats.base import F32, U8
from pykv.formats.coded import MOST_SCALE, CodedFormat, HeadNumbers, Parameters


class Int8(CodedFormat):
    """A signed byte, scaled by token."""

    bits, key_axis, value_axis = 8, "token", "token"

    def quantize(self, x: F32, numbers: HeadNumbers | None = None) -> tuple[U8, Parameters]:
        """Codes -127 to 127, halves rounded to even; 0 where the scale is 0."""
        top = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        s = np.minimum(top, np.float32(MOST_SCALE)).astype(np.float16).astype(np.float32)
        ratio = np.divide(x, s, out=np.zeros_like(x), where=s > 0)
        q = np.clip(np.rint(ratio), -127, 127)
        return q.astype(np.int8).view(np.uint8), (s,)

    def dequantize(
        self, codes: U8, parameters: Parameters, numbers: HeadNumbers | None = None
    ) -> F32:
        """s * code."""
        return parameters[0] * codes.view(np.int8).astype(np.float32)


FORMAT = Int8()
