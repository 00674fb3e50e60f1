"""Running batches on the GPU: a prompt's launches one by one, a decoding step's as a CUDA graph.

When a step is first met its launches are made one by one, which compiles what it needs; when as
many rows come again they are captured as well, and replayed from then on. Pages that a step fills
are encoded after it, which is a graph of its own. Where graphs cannot be had, and under a policy,
the same launches are made each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pykv.backends import cuda_kept
from pykv.backends.base import F32, Move, Step
from pykv.backends.cuda_attention import MOST_ROWS, CudaAttention, moves_of
from pykv.backends.cuda_maps import LayerMaps
from pykv.backends.cuda_memory import Changing, Tables

log = logging.getLogger("pykv")

Forward = Callable[[Step, CudaAttention], torch.Tensor]  # a batch's launches; logits [outputs, V]


@dataclass
class _Captured:
    """What can be replayed, what it reads and what it gives; `kept` stays alive with it."""

    replay: Callable[[], None]
    batch: CudaAttention
    logits: torch.Tensor
    kept: tuple[Any, ...]


class Steps:
    """Batches on one device; `graphs`: whether decoding steps are captured."""

    def __init__(self, device: torch.device, deterministic: bool, graphs: bool) -> None:
        self._device, self._deterministic, self.graphs = device, deterministic, graphs
        self._tables = Tables(device)
        self._maps: dict[int, tuple[Any, list[LayerMaps]]] = {}
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._encoders: dict[tuple[Any, ...], tuple[Callable[[], None], Changing, Any]] = {}
        self._met: set[tuple[Any, ...]] = set()  # steps and encoders that ran once
        self._side: torch.cuda.Stream | None = None  # that captures are made on
        self._pools: dict[str, Any] = {}  # where graphs of a kind compute, one after the other

    def forget(self) -> None:
        """After a batch that broke off: tables on the device may be half brought up to date."""
        self._tables.forget()

    def close(self) -> None:
        """Give back what batches left."""
        for held in (self._maps, self._captured, self._encoders, self._pools, self._met):
            held.clear()
        self._tables.forget()

    def run(self, graph: Any, step: Step, forward: Forward) -> tuple[torch.Tensor, CudaAttention]:
        """Logits on the device, [outputs, V], and the batch, which knows what went wrong."""
        if step.policy is not None:
            batch = self._batch(step)
            batch.move(step.policy.moves)
            logits = self._read(step, batch, forward)
            batch.collect()
            return logits, batch
        if step.n_rows > MOST_ROWS or len(step.rounds) > 1:
            batch = self._batch(step)
            return self._read(step, batch, forward), batch
        return self._decode(graph, step, forward)

    def move(self, step: Step, moves: Sequence[Move]) -> None:
        """Make pages of tokens of other pages."""
        self._batch(step).move(moves)

    def window_sums(self, step: Step, layer: int, queries: F32) -> F32:
        """See Backend.window_sums."""
        return cuda_kept.window_sums(self._batch(step), layer, queries)

    def _batch(self, step: Step) -> CudaAttention:
        key = id(step.formats)
        if key not in self._maps:
            numbers = step.numbers or ((),) * len(step.shapes)
            layers = zip(step.shapes, step.formats, numbers, strict=True)
            self._maps[key] = step.formats, [LayerMaps(*x, self._device) for x in layers]
        return CudaAttention(
            self._device, step, self._maps[key][1], self._tables, self._deterministic
        )

    def _read(self, step: Step, batch: CudaAttention, forward: Forward) -> torch.Tensor:
        """A prompt: pages are encoded between its rounds."""
        moves, batch.moves = moves_of(step, self._tables)
        batch.far_moves = torch.from_numpy(moves).to(self._device)
        return forward(step, batch)

    def _decode(self, graph: Any, step: Step, forward: Forward) -> tuple[torch.Tensor, Any]:
        """Few rows; nothing of them sees the pages that they fill encoded."""
        key = (id(graph), step.n_rows, len(step.outputs), id(step.formats), id(step.memory))
        known = self._captured.get(key)
        if known is not None:
            known.batch.set(step, self._tables)
            known.replay()
            logits, batch = known.logits, known.batch
        else:
            batch = self._batch(step)
            logits = forward(step, batch)
            replay = self._capture(key, lambda: forward(step, batch), "decoding")
            if replay is not None:
                kept = (graph, step.formats, step.memory)
                self._captured[key] = _Captured(replay[0], batch, replay[1], kept)
        if step.rounds[0].moves:
            self._encode(step, batch)
        return logits, batch

    def _capture(
        self, key: tuple[Any, ...], launch: Callable[[], Any], kind: str
    ) -> tuple[Callable[[], None], Any] | None:
        """What runs `launch` again, and its result's memory; None: the key is new, or no graphs.

        Graphs of a kind share their memory: what one gives is read before the next is replayed. A
        page is encoded before a step's logits are read, and so elsewhere.
        """
        if not self.graphs or key not in self._met:
            self._met.add(key)
            return None
        try:
            result, graph = self._recorded(launch, self._pools.get(kind))
            self._pools.setdefault(kind, graph.pool())
        except RuntimeError as error:
            if error.__context__ is not None and not isinstance(error.__context__, RuntimeError):
                raise error.__context__ from None  # an interrupt, at which the capture failed
            self.graphs = False
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            log.warning("decoding goes on without CUDA graphs, and slower: %s", reason)
            return None
        return graph.replay, result

    def _recorded(self, launch: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        """The result of `launch`, which does not run now, and its graph."""
        graph = torch.cuda.CUDAGraph()
        if self._side is None:  # torch's own is of the device that was the first to capture
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        now = torch.cuda.current_stream(self._device)
        # torch stays on the other stream where the end of a capture fails; another thread's use of
        # the GPU is no reason to fail
        with (
            torch.cuda.stream(now),
            torch.cuda.graph(graph, pool, self._side, capture_error_mode="thread_local"),
        ):
            result = launch()
        return result, graph

    def _encode(self, step: Step, batch: CudaAttention) -> None:
        """Encode the pages that a decoding step filled."""
        moves, places = moves_of(step, self._tables)
        if not len(moves):
            return
        sizes = tuple(s.stop for layer in places[0] for s in layer)
        key = (id(step.formats), id(step.memory), sizes)
        if key in self._encoders:
            replay, changing, _ = self._encoders[key]
            changing.host["moves"][:] = moves
            changing.send()
            replay()
            return
        changing = Changing(self._device, {"moves": moves})
        changing.send()

        def launch() -> None:
            for layer, sides in enumerate(places[0]):
                batch.encode(layer, [changing.far["moves"][s] for s in sides])

        launch()
        captured = self._capture(key, launch, "encoding")
        if captured is not None:
            self._encoders[key] = captured[0], changing, (batch, step.formats, step.memory)
