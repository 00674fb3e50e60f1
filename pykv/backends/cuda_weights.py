"""A model's matrices on the GPU, as they lie in its file."""

from __future__ import annotations

import numpy as np
import torch

from pykv.backends import plan
from pykv.backends.base import WeightSource
from pykv.kernels import launch_triton

UPLOAD_BYTES = 64 << 20  # of a weight that is copied at a time


class Weight:
    """A matrix [n_out, n_in] as it lies in the file; `data` is on the device once uploaded."""

    data: torch.Tensor
    table: torch.Tensor

    def __init__(self, tensor: WeightSource) -> None:
        self.n_out, self.n_in = tensor.shape if len(tensor.shape) == 2 else (1, tensor.shape[0])
        self.type, host = tensor.type, tensor.data
        if not plan.has_gpu_weight(tensor):
            self.type = "f32"
            host = plan.decode(tensor).reshape(self.n_out, self.n_in).view(np.uint8)
        self._host = host.reshape(self.n_out, -1)
        self.row_bytes = self._host.shape[1]
        self.nbytes = self._host.nbytes
        self.uploaded = False
        self.panel_type: torch.dtype | None = None  # float16, or float32 where that overflows

    def upload(self, device: torch.device) -> None:
        """Copy it to the device, once."""
        if self.uploaded:
            return
        self.data = torch.empty(self._host.shape, dtype=torch.uint8, device=device)
        rows = max(1, UPLOAD_BYTES // self.row_bytes)
        for first in range(0, self.n_out, rows):
            part = torch.from_numpy(np.array(self._host[first : first + rows]))
            self.data[first : first + rows].copy_(part)
        self.table = torch.tensor(
            launch_triton.table(self.type), dtype=torch.float32, device=device
        )
        self.uploaded = True
