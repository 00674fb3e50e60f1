"""The GPU backend: torch for memory, Triton for kernels; NVIDIA's CUDA and AMD's ROCm alike.

Verbs launch their kernels at once, but for two that wait for what follows: a norm goes into the
products that read it, and products of the same few rows (q, k and v; gate and up) become one
launch. Weights are uploaded as they lie in the file; a prompt's products decode panels of them to
float16 and go through torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pykv.backends import plan
from pykv.backends.base import (
    F32,
    Array,
    Backend,
    CacheFormats,
    Choice,
    Chosen,
    LayerShape,
    Move,
    Rope,
    Step,
    WeightSource,
)
from pykv.backends.cuda_attention import MOST_ROWS, CudaAttention, sums_bytes
from pykv.backends.cuda_choice import choose
from pykv.backends.cuda_device import device_of, give_back, missing, told, wait
from pykv.backends.cuda_memory import DeviceMemory, tables_bytes
from pykv.backends.cuda_steps import Steps
from pykv.backends.cuda_weights import Weight
from pykv.errors import NumericsError, UnsupportedError
from pykv.kernels import elementwise_triton, matvec_triton

PANEL_BYTES = 64 << 20  # of a weight that is decoded at a time for a prompt
GRAPH_BYTES = 128 << 20  # about what graphs compute in, and cuBLAS on two streams
LOADING = "use a smaller model, or --device cpu"  # what to do where memory is short
RUNNING = "use a smaller --ubatch-size, --ctx-size or --cache-type-k and -v"
TOP_EXPONENT = 10  # a prompt's inputs are scaled to below 2**10 before they become float16
PRODUCTS = 3  # that share a launch
LEAST_EXPONENT = -116  # of a row of a prompt's inputs: beyond, its power of two overflows

__all__ = ["CudaBackend", "create", "missing"]


@dataclass
class _Norm:
    """A norm that has not run: out = rms_norm(x) * weight."""

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    out: torch.Tensor


class CudaBackend(Backend):
    """Triton kernels on one GPU.

    `device`: a torch device; "cpu" runs them in Triton's interpreter, for tests. `graphs`: whether
    decoding steps are captured. `progress` is told that kernels may be compiled.
    `deterministic`: every batch goes row by row through the same kernels, so that a row's result
    does not depend on the rows beside it.
    """

    name, chooses, keeps = "cuda", True, True

    def __init__(
        self,
        device: str = "cuda",
        deterministic: bool = False,
        graphs: bool = True,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._device = device_of(device)
        self._gpu = self._device.type == "cuda"
        self._deterministic, self.warms_up = deterministic, self._gpu
        self._progress = progress
        self._weights: list[Weight] = []
        self._steps = Steps(self._device, deterministic, graphs and self._gpu)
        self._batch: CudaAttention | None = None
        self._products: list[tuple[torch.Tensor, Weight, torch.Tensor]] = []  # x, weight, out
        self._norms: dict[int, _Norm] = {}  # by the address of what they give
        self._clamped: set[int] = set()
        self._lock = threading.Lock()
        self.plan = []

    def load(self, tensor: WeightSource) -> Weight:  # noqa: D102
        self._weights.append(Weight(tensor))
        return self._weights[-1]

    def load_heads(self, tensor: WeightSource) -> Any:  # noqa: D102
        raise UnsupportedError(
            f"{tensor.name} has a matrix for each head, as multi-head latent attention does, for "
            "which there are no GPU kernels yet; use --device cpu"
        )

    def heads_linear(self, x: Array, weight: Any) -> Array:  # noqa: D102
        raise UnsupportedError("products by head have no GPU kernels yet; use --device cpu")

    def columns(self, x: Array, first: int, stop: int) -> Array:  # noqa: D102
        return self._ready(x)[..., first:stop].contiguous()

    def concat(self, x: Array, y: Array) -> Array:  # noqa: D102
        return torch.cat([self._ready(x), self._ready(y)], dim=-1)

    def load_vector(self, tensor: WeightSource) -> torch.Tensor:  # noqa: D102
        with told(self._device, LOADING):
            return torch.from_numpy(plan.decode(tensor).reshape(-1).copy()).to(self._device)

    def page_memory(self) -> DeviceMemory:  # noqa: D102
        # in the interpreter what was never written is NaN
        return DeviceMemory(self._device, fill=None if self._gpu else 255)

    def free_bytes(self) -> int | None:  # noqa: D102
        give_back(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) if self._gpu else None

    def own_bytes(self, shapes: Sequence[LayerShape], n_ctx: int) -> int:  # noqa: D102
        sums = max(sums_bytes(s, MOST_ROWS, n_ctx) for s in shapes)
        return sums + tables_bytes(shapes, n_ctx) + 2 * PANEL_BYTES + GRAPH_BYTES

    def prepare(self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]) -> None:  # noqa: D102
        plan.check_gpu_cache(formats)
        total = sum(w.nbytes for w in self._weights) / 2**20
        with told(self._device, f"its weights take {total:,.0f} MiB: {LOADING}"):
            for weight in self._weights:
                weight.upload(self._device)
        if self._progress is not None:
            self._progress("the GPU's kernels")
        where = torch.cuda.get_device_name(self._device) if self._gpu else "Triton's interpreter"
        self.plan = [
            f"cuda backend: {where}",
            f"weights: {', '.join(sorted({w.type for w in self._weights}))}",
            "decoding: " + ("CUDA graphs" if self._steps.graphs else "a launch for each kernel"),
        ]

    def facts(self) -> dict[str, Any]:  # noqa: D102
        return {"threads": 1}

    def close(self) -> None:  # noqa: D102
        self._steps.close()
        self._weights.clear()
        self._end()
        give_back(self._device)

    # running a batch

    def run(self, graph: Any, step: Step) -> F32:  # noqa: D102
        logits: F32 = self._run(graph, step, lambda logits: logits.cpu().numpy())
        return logits

    def choose(self, graph: Any, step: Step, choice: Choice) -> Chosen:  # noqa: D102
        chosen: Chosen = self._run(graph, step, lambda logits: choose(logits[0], choice))
        return chosen

    def prepare_moves(  # noqa: D102
        self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]
    ) -> None:
        self.plan[2:] = ["decoding: a launch for each kernel, as a policy decides after each token"]

    def move(self, step: Step, moves: Sequence[Move]) -> None:  # noqa: D102
        with self._lock, told(self._device, RUNNING):
            self._steps.move(step, moves)

    def window_sums(self, step: Step, layer: int, queries: F32) -> F32:  # noqa: D102
        with self._lock, told(self._device, RUNNING):
            return self._steps.window_sums(step, layer, queries)

    def _run(self, graph: Any, step: Step, then: Callable[[torch.Tensor], Any]) -> Any:
        with self._lock, told(self._device, RUNNING):
            step.check_cancelled()
            try:
                logits, batch = self._steps.run(
                    graph, step, lambda step, batch: self._forward(graph, step, batch)
                )
                result = then(logits)  # waits for the device
                for layer, count in batch.check():
                    self._report_clamped(layer, count)
            except BaseException:
                wait(self._device)  # nothing reads what the next batch writes
                self._steps.forget()
                raise
            return result

    def _forward(self, graph: Any, step: Step, batch: CudaAttention) -> torch.Tensor:
        self._batch = batch
        try:
            logits: torch.Tensor = self._ready(graph.forward(step))
            return logits
        finally:
            self._end()

    def _end(self) -> None:
        self._batch = None
        self._products.clear()
        self._norms.clear()

    @property
    def _now(self) -> CudaAttention:
        if self._batch is None:
            raise NumericsError("a verb was called outside a batch")
        return self._batch

    def _report_clamped(self, layer: int, count: int) -> None:
        if layer not in self._clamped:
            self._clamped.add(layer)
            plan.warn_clamped(layer, count)

    # what waits

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def _ready(self, x: torch.Tensor) -> torch.Tensor:
        """x, once what gives it has been launched."""
        if any(out.data_ptr() == x.data_ptr() for _, _, out in self._products):
            self._launch_products()
        norm = self._norms.pop(x.data_ptr(), None)
        if norm is not None:
            elementwise_triton.rms_norm(self._ready(norm.x), norm.weight, norm.out, norm.eps)
        return x

    def _inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, float] | None]:
        """What products of x read: x, or what its norm reads, and the norm."""
        norm = self._norms.get(x.data_ptr())
        if norm is None or norm.x.dim() != 2:
            return self._ready(x), None
        return self._ready(norm.x), (norm.weight, norm.eps)

    def _launch_products(self) -> None:
        waiting, self._products = self._products, []
        if waiting:
            x, norm = self._inputs(waiting[0][0])
            matvec_triton.products(
                x, [w for _, w, _ in waiting], [out for _, _, out in waiting], norm=norm,
                deterministic=self._deterministic,
            )  # fmt: skip

    # verbs

    def array(self, x: F32) -> Array:  # noqa: D102
        return torch.from_numpy(np.array(x, np.float32)).to(self._device)

    def embed(self, weight: Weight, step: Step) -> Array:  # noqa: D102
        out = self._empty(step.n_rows, weight.n_in)
        matvec_triton.panel(weight, out, rows=self._now.changing.far["tokens"])
        return out

    def linear(self, x: Array, weight: Weight, add: Array | None = None) -> Array:  # noqa: D102
        if len(x) > MOST_ROWS and not self._deterministic:
            return self._linear_torch(self._ready(x), weight, add)
        out = self._empty(len(x), weight.n_out)
        if self._products:
            first = self._products[0][0].data_ptr()
            alike = add is None and x.data_ptr() == first and len(self._products) < PRODUCTS
            if not alike:
                self._launch_products()
        if add is None:
            self._products.append((x, weight, out))
            return out
        inputs, norm = self._inputs(x)
        matvec_triton.products(
            inputs, [weight], [out], add=self._ready(add), norm=norm,
            deterministic=self._deterministic,
        )  # fmt: skip
        return out

    def _linear_torch(self, x: torch.Tensor, weight: Weight, add: Array | None) -> torch.Tensor:
        """Panels of the weight as float16, and torch's product of both with float32 sums."""
        if weight.panel_type is None:
            weight.panel_type = self._panel_type(weight)
        out, rows = self._empty(len(x), weight.n_out), PANEL_BYTES // (weight.n_in * 4)
        # a power of two for each row, so that no input overflows and few get lost
        _, exponent = torch.frexp(x.abs().amax(1, keepdim=True))
        shift = (exponent.clamp(min=LEAST_EXPONENT) - TOP_EXPONENT).to(torch.float32)
        inputs = (x * torch.exp2(-shift)).to(weight.panel_type)
        for first in range(0, weight.n_out, rows):
            part = slice(first, min(first + rows, weight.n_out))
            panel = torch.empty(
                part.stop - first, weight.n_in, dtype=weight.panel_type, device=self._device
            )
            matvec_triton.panel(weight, panel, first=first)
            out[:, part] = self._matmul(inputs, panel)
        out *= torch.exp2(shift)
        if add is not None:
            out += self._ready(add)
        return out

    def _matmul(self, x: torch.Tensor, panel: torch.Tensor) -> torch.Tensor:
        """x @ panel.T in float32, whatever both are."""
        # ROCm's refuses to give float32
        if self._gpu and x.dtype == torch.float16 and torch.version.hip is None:
            return torch.mm(x, panel.T, out_dtype=torch.float32)
        return x.float() @ panel.float().T

    def _panel_type(self, weight: Weight) -> torch.dtype:
        """float16, but where a weight is larger than that can be."""
        flag = torch.zeros(1, dtype=torch.int32, device=self._device)
        rows = PANEL_BYTES // (weight.n_in * 4)
        for first in range(0, weight.n_out, rows):
            count = min(rows, weight.n_out - first)
            panel = torch.empty(count, weight.n_in, dtype=torch.float16, device=self._device)
            matvec_triton.panel(weight, panel, first=first, flag=flag)
        return torch.float32 if flag.item() else torch.float16

    def rms_norm(self, x: Array, weight: torch.Tensor, eps: float) -> Array:  # noqa: D102
        out = torch.empty_like(x)
        self._norms[out.data_ptr()] = _Norm(x, weight, eps, out)
        # under `deterministic` a norm must be the same for any number of rows
        return self._ready(out) if len(x) > MOST_ROWS or self._deterministic else out

    def attention(  # noqa: D102
        self, step: Step, layer: int, q: Array, k: Array, v: Array, rope: Rope | None, scale: float
    ) -> Array:
        step.check_cancelled()
        return self._now.attend(layer, self._ready(q), self._ready(k), self._ready(v), rope, scale)

    def _gated(self, act: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        waiting = [out.data_ptr() for _, _, out in self._products]
        out = torch.empty_like(gate)
        if waiting == [gate.data_ptr(), up.data_ptr()]:
            (x, of_gate, _), (_, of_up, _) = self._products
            self._products = []
            inputs, norm = self._inputs(x)
            matvec_triton.gated(
                inputs, of_gate, of_up, out, act, norm=norm, deterministic=self._deterministic
            )
        else:
            elementwise_triton.gate(self._ready(gate), self._ready(up), out, act)
        return out

    def swiglu(self, gate: Array, up: Array) -> Array:  # noqa: D102
        return self._gated("silu", gate, up)

    def geglu(self, gate: Array, up: Array) -> Array:  # noqa: D102
        return self._gated("gelu", gate, up)

    def add(self, x: Array, y: Array) -> Array:  # noqa: D102
        out, norm = torch.empty_like(x), self._norms.pop(y.data_ptr(), None)
        if norm is not None:
            elementwise_triton.rms_norm(
                self._ready(norm.x), norm.weight, out, norm.eps, add=self._ready(x)
            )
        else:
            elementwise_triton.add(self._ready(x), self._ready(y), out)
        return out

    def bias(self, x: Array, weight: torch.Tensor) -> Array:  # noqa: D102
        out = torch.empty_like(x)
        elementwise_triton.bias(self._ready(x), weight, out)
        return out

    def scale(self, x: Array, factor: float) -> Array:  # noqa: D102
        out = torch.empty_like(x)
        elementwise_triton.scale(self._ready(x), factor, out)
        return out

    def softcap(self, x: Array, limit: float) -> Array:  # noqa: D102
        out = torch.empty_like(x)
        elementwise_triton.softcap(self._ready(x), limit, out)
        return out

    def take_rows(self, x: Array, step: Step) -> Array:  # noqa: D102
        return self._ready(x).index_select(0, self._now.changing.far["outputs"])


def create(**settings: Any) -> CudaBackend:
    """A GPU backend; settings are those of CudaBackend."""
    return CudaBackend(**settings)
