"""What a backend can do, and what it is told about the cache.

A model graph is written against these verbs and never touches an array library. Arrays that verbs
take and give are the backend's own; a graph may ask one for `shape` and `reshape`, and hands it on.
A backend may run a verb at once or note it down until `logits` are asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from pykv.backends.step import (
    F32,
    I32,
    I64,
    PAGE,
    RECORD,
    U8,
    CacheFormats,
    Choice,
    Chosen,
    Keeper,
    LayerShape,
    Move,
    PageMemory,
    PageTables,
    Part,
    Policy,
    Rope,
    Round,
    Segment,
    Step,
)

__all__ = [
    "Array",
    "Backend",
    "CacheFormats",
    "Choice",
    "Chosen",
    "F32",
    "I32",
    "I64",
    "Keeper",
    "LayerShape",
    "Move",
    "PAGE",
    "PageMemory",
    "PageTables",
    "Part",
    "Policy",
    "RECORD",
    "Rope",
    "Round",
    "Segment",
    "Step",
    "U8",
    "WeightSource",
]

Array = Any  # a backend's own array


class WeightSource(Protocol):
    """A tensor as the file reader gives it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def type(self) -> str: ...  # noqa: D102
    @property
    def data(self) -> U8: ...  # noqa: D102


class Backend(ABC):
    """The verbs.  T tokens, E embedding, H query heads, G KV heads, D channels of a head."""

    name: str
    plan: list[str]  # what was chosen, a line each

    @abstractmethod
    def load(self, tensor: WeightSource) -> Any:
        """A weight for `linear` and `embed` ([n_out, n_in]); its bytes stay where they are."""

    @abstractmethod
    def load_vector(self, tensor: WeightSource) -> Any:
        """A norm's weight, decoded to float32."""

    @abstractmethod
    def prepare(self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]) -> None:
        """Choose, and compile, the kernels for these caches."""

    @abstractmethod
    def run(self, graph: Any, step: Step) -> F32:
        """Run `graph.forward` for a batch; returns logits f32 [len(step.outputs), vocabulary].

        Raises NumericsError: NaN or infinity in keys or values (layer and position are named);
        CancelledError: `step.cancelled` said so.
        """

    chooses = False  # whether `choose` draws tokens where the logits lie
    warms_up = False  # whether a step that is met for the first time takes long

    def choose(self, graph: Any, step: Step, choice: Choice) -> Chosen:
        """Run a batch with one output, and draw a token after it.  Raises as `run`."""
        raise NotImplementedError

    def page_memory(self) -> PageMemory | None:
        """Where a store's pages are to lie; None: in the process's own memory."""
        return None

    def free_bytes(self) -> int | None:
        """Free memory of a device of its own; None: it has none, or does not tell."""
        return None

    def own_bytes(self, shapes: Sequence[LayerShape], n_ctx: int) -> int:
        """What the backend takes of that memory, beside weights, cache and a batch's numbers."""
        return 0

    keeps = False  # whether policies can run here

    def prepare_moves(self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]) -> None:
        """Make ready what policies need beside attention.  Where `keeps` is True."""
        raise NotImplementedError

    def move(self, step: Step, moves: Sequence[Move]) -> None:
        """Make pages of tokens of other pages, outside a batch."""
        raise NotImplementedError

    def window_sums(self, step: Step, layer: int, queries: F32) -> F32:
        """Attention of queries [n, H, D], turned and scaled, summed over them: [H, capacity, 64].

        The step's rows are theirs; its records say what each sees.
        """
        raise NotImplementedError

    @abstractmethod
    def array(self, x: F32) -> Array:
        """An array as the backend's own."""

    @abstractmethod
    def embed(self, weight: Any, step: Step) -> Array:
        """The batch's tokens' rows of `weight`: [T, E]."""

    @abstractmethod
    def linear(self, x: Array, weight: Any, add: Array | None = None) -> Array:
        """[T, n_in] -> [T, n_out], plus `add` of that shape."""

    @abstractmethod
    def load_heads(self, tensor: WeightSource) -> Any:
        """Matrices for `heads_linear`, [H, n_out, n_in].

        Raises UnsupportedError: the backend has no such products.
        """

    @abstractmethod
    def heads_linear(self, x: Array, weight: Any) -> Array:
        """[T, H, n_in] -> [T, H, n_out], each head by its own matrix."""

    @abstractmethod
    def columns(self, x: Array, first: int, stop: int) -> Array:
        """The last axis from `first` to `stop` - 1."""

    @abstractmethod
    def concat(self, x: Array, y: Array) -> Array:
        """[..., N] and [..., M] -> [..., N + M]."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Any, eps: float) -> Array:
        """Normalise the last axis and multiply by `weight`."""

    @abstractmethod
    def attention(
        self, step: Step, layer: int, q: Array, k: Array, v: Array, rope: Rope | None, scale: float
    ) -> Array:
        """Write k [T, G, D] and v to the cache and attend with q [T, H, D]: [T, H * D].

        q and k are turned by `rope` first; scores are multiplied by `scale`. Where the layer's
        values are channels of its keys, v is not looked at.
        """

    @abstractmethod
    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up."""

    @abstractmethod
    def geglu(self, gate: Array, up: Array) -> Array:
        """gelu(gate) * up, in the tanh form."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """x + y."""

    @abstractmethod
    def bias(self, x: Array, weight: Any) -> Array:
        """[T, N] plus a vector [N]."""

    @abstractmethod
    def scale(self, x: Array, factor: float) -> Array:
        """x * factor."""

    @abstractmethod
    def softcap(self, x: Array, limit: float) -> Array:
        """limit * tanh(x / limit)."""

    @abstractmethod
    def take_rows(self, x: Array, step: Step) -> Array:
        """The rows of x whose logits are wanted."""

    def facts(self) -> dict[str, Any]:
        """What a report says about the backend: threads, compile_seconds."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Give back what the backend holds."""
