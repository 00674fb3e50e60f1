"""What a layer's kernels are told on the GPU, beside a batch: maps, numbers, and how to compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pykv.backends.base import CacheFormats, LayerShape
from pykv.backends.page_maps import PageMaps
from pykv.kernels import launch_triton

LEAST_SHARED = 64 << 10  # bytes that every GPU has for a block


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of threads can have."""
    if device.type != "cuda":
        return LEAST_SHARED
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0) or LEAST_SHARED)


class LayerMaps:
    """What a layer's kernels read beside pages, and their compile-time parameters."""

    def __init__(
        self, shape: LayerShape, formats: CacheFormats, numbers: Sequence[Any], device: torch.device
    ) -> None:
        maps = PageMaps(shape, formats, numbers)
        self.d_k, self.d_v = maps.d_k, maps.d_v  # of pages

        def far(array: Any) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.extra_k = far(launch_triton.extra(formats.page_k, maps.extra_k))
        self.extra_v = far(launch_triton.extra(formats.page_v, maps.extra_v))
        # [KV heads or 1, D, R], as they are without their filling
        self.matrix_k = None if maps.matrix_k is None else far(maps.matrix_k[..., : maps.d_k])
        self.matrix_v = None if maps.matrix_v is None else far(maps.matrix_v[..., : maps.d_v])
        types = formats.page_k, formats.page_v
        tails = formats.tail_k, formats.tail_v
        self.mapped = self.matrix_v is not None
        nvidia = device.type == "cuda" and torch.version.hip is None
        self.fixed = launch_triton.attention(
            types, (shape.d_k, shape.d_v), (maps.d_k, maps.d_v), self.mapped, tails,
            launch_triton.operand(types + tails), precision=launch_triton.precision(nvidia),
        ) | {"ENCODED": not formats.exact}  # fmt: skip
        turned, room = formats.position == "read", _shared_bytes(device)
        self.of_rows, self.of_prompts = (
            launch_triton.options(types, self.fixed, prompt, room, turned, nvidia)
            for prompt in (False, True)
        )
        self.lines = launch_triton.prompt_lines(self.fixed, room, turned)
        page_d = maps.d_v if self.mapped else None
        self.combination = launch_triton.combination(shape.n_head, shape.d_v, page_d)
        self.size = launch_triton.sums(shape.d_v, page_d)
