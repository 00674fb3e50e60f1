"""What every architecture starts from: numbers from the file, weights by name, a graph's frame."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32, U8, Array, Backend, LayerShape, Rope, Step, WeightSource
from pykv.backends.plan import decode
from pykv.errors import GGUFError, UnsupportedError


class ModelFile(Protocol):
    """What a graph reads of a model file; GGUFError names file, key and tensor."""

    @property
    def file(self) -> str: ...  # noqa: D102
    @property
    def metadata(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def tensors(self) -> dict[str, Any]: ...  # noqa: D102
    def get_int(self, key: str, default: int | None = ...) -> Any: ...  # noqa: D102
    def get_float(self, key: str, default: float | None = ...) -> Any: ...  # noqa: D102
    def get_str(self, key: str, default: str | None = ...) -> Any: ...  # noqa: D102
    def get_bool(self, key: str, default: bool | None = ...) -> Any: ...  # noqa: D102
    def get_ints(self, key: str, n: int, default: list[int] = ...) -> list[int]: ...  # noqa: D102
    def require(self, name: str, shape: tuple[int, ...] | None = ...) -> Any: ...  # noqa: D102


@dataclass(frozen=True)
class Hparams:
    """Numbers that all architectures have, read from `<architecture>.*` keys."""

    arch: str
    n_ctx: int  # tokens that the model was trained for
    n_embd: int
    n_layer: int
    n_ff: tuple[int, ...]  # per layer
    n_head: tuple[int, ...]  # per layer
    n_kv: tuple[int, ...]  # per layer
    d_k: int
    d_v: int
    n_vocab: int
    eps: float

    @classmethod
    def read(cls, file: ModelFile, n_vocab: int) -> Hparams:
        """From the metadata.

        Raises GGUFError: a key is missing or makes no sense; UnsupportedError: an encoder.
        """
        arch = file.get_str("general.architecture")
        if not file.get_bool(f"{arch}.attention.causal", True):
            raise UnsupportedError(
                f"{file.file}: {arch}.attention.causal is false, which marks an encoder; pykv runs "
                "models that generate text"
            )
        n_layer = _count(file, f"{arch}.block_count", 512)
        n_embd = _count(file, f"{arch}.embedding_length", 1 << 20)
        heads = file.get_ints(f"{arch}.attention.head_count", n_layer)
        first = max(heads[0], 1)
        kv = file.get_ints(f"{arch}.attention.head_count_kv", n_layer, heads)
        for n_head, n_kv in zip(heads, kv, strict=True):
            if n_head < 1 or n_kv < 1 or n_head % n_kv:
                raise GGUFError(
                    f"{file.file}: {arch}.attention.head_count {n_head} must be a positive "
                    f"multiple of head_count_kv {n_kv}"
                )
        d_k = file.get_int(f"{arch}.attention.key_length", n_embd // first)
        d_v = file.get_int(f"{arch}.attention.value_length", n_embd // first)
        for key, d in (("key_length", d_k), ("value_length", d_v)):
            if not 1 <= d <= 1024:
                raise GGUFError(f"{file.file}: {arch}.attention.{key} is {d}, not 1 to 1024")
        return cls(
            arch, _count(file, f"{arch}.context_length", 1 << 31), n_embd, n_layer,
            tuple(file.get_ints(f"{arch}.feed_forward_length", n_layer)), tuple(heads), tuple(kv),
            d_k, d_v, n_vocab, _epsilon(file, arch),
        )  # fmt: skip


def _epsilon(file: ModelFile, arch: str) -> float:
    eps: float = file.get_float(f"{arch}.attention.layer_norm_rms_epsilon")
    if not 0 <= eps < 1:
        raise GGUFError(f"{file.file}: layer_norm_rms_epsilon is {eps}, not 0 to 1")
    return eps


def _count(file: ModelFile, key: str, most: int) -> int:
    n: int = file.get_int(key)
    if not 1 <= n <= most:
        raise GGUFError(f"{file.file}: {key} is {n}, not 1 to {most}")
    return n


@dataclass(frozen=True, eq=False)
class Values:
    """Numbers made at load, as a backend takes tensors."""

    name: str
    values: F32

    @property
    def shape(self) -> tuple[int, ...]:
        """The values' shape."""
        return self.values.shape

    @property
    def type(self) -> str:
        """Float32."""
        return "f32"

    @property
    def data(self) -> U8:
        """The values' bytes."""
        return self.values.view(np.uint8)


class Weights:
    """Tensors by name, bound to a backend once; what no graph asked for is left over."""

    def __init__(self, file: ModelFile, dev: Backend) -> None:
        self._file, self._dev = file, dev
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the file holds `name`."""
        return name in self._file.tensors

    def matrix(self, name: str, n_out: int, n_in: int) -> Any:
        """A weight for `linear`.  Raises GGUFError: missing, or of another shape."""
        self._used.add(name)
        return self._dev.load(self._file.require(name, (n_out, n_in)))

    def heads(self, name: str, shape: tuple[int, int, int]) -> Any:
        """Matrices [H, n_out, n_in] for `heads_linear`.  Raises GGUFError: as `matrix`."""
        self._used.add(name)
        return self._dev.load_heads(self._file.require(name, shape))

    def vector(self, name: str, n: int) -> Any:
        """A norm's weight or a bias.  Raises GGUFError: missing, or of another shape."""
        self._used.add(name)
        return self._dev.load_vector(self._file.require(name, (n,)))

    def part(self, name: str, start: int, stop: int, n: int) -> Any:
        """Values [start, stop) of a fused bias of n.  Raises GGUFError as `vector`."""
        values = decode(self.source(name, (n,)))[start:stop]
        return self._dev.load_vector(Values(f"{name}[{start}:{stop}]", values))

    def optional_vector(self, name: str, n: int) -> Any | None:
        """Like `vector`, or None where the file has none."""
        return self.vector(name, n) if self.has(name) else None

    def rows(self, name: str, start: int, stop: int, n_in: int, n_rows: int) -> Any:
        """Rows of a fused matrix, where they lie."""
        self._used.add(name)
        return self._dev.load(self._file.require(name, (n_rows, n_in)).rows(start, stop))

    def source(self, name: str, shape: tuple[int, ...]) -> WeightSource:
        """The tensor itself, for numbers that the graph needs at load."""
        self._used.add(name)
        tensor: WeightSource = self._file.require(name, shape)
        return tensor

    def check_all_used(self) -> None:
        """Raises UnsupportedError: a tensor would be ignored, and the model's output be wrong."""
        left = sorted(set(self._file.tensors) - self._used)
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise UnsupportedError(
                f"{self._file.file} holds tensors that pykv does not know for this architecture: "
                f"{', '.join(left[:3])}{more}; without them its output would be wrong"
            )


class Graph(ABC):
    """An architecture: weights bound to a backend, and the layers' arithmetic."""

    def __init__(self, file: ModelFile, n_vocab: int, dev: Backend) -> None:
        self.file, self.dev = file, dev
        self.h = Hparams.read(file, n_vocab)
        self.weights = Weights(file, dev)
        self.embedding = self.weights.matrix("token_embd.weight", n_vocab, self.h.n_embd)
        self.output_norm = self.weights.vector("output_norm.weight", self.h.n_embd)
        self.output = self.embedding  # tied, unless the file has one
        if self.weights.has("output.weight"):
            self.output = self.weights.matrix("output.weight", n_vocab, self.h.n_embd)
        self.layers = [self.load_layer(i) for i in range(self.h.n_layer)]
        self.weights.check_all_used()

    @property
    @abstractmethod
    def shapes(self) -> Sequence[LayerShape]:
        """The cache's shape in each layer."""

    @abstractmethod
    def load_layer(self, i: int) -> Any:
        """The weights of layer i."""

    @abstractmethod
    def layer(self, i: int, x: Array, step: Step) -> Array:
        """One block, [T, E] -> [T, E]."""

    def embed(self, step: Step) -> Array:
        """The tokens' embeddings, [T, E]."""
        return self.dev.embed(self.embedding, step)

    def forward(self, step: Step) -> Array:
        """Logits of the rows that are wanted, [outputs, V]."""
        x = self.embed(step)
        for i in range(self.h.n_layer):
            x = self.layer(i, x, step)
        x = self.dev.rms_norm(self.dev.take_rows(x, step), self.output_norm, self.h.eps)
        return self.dev.linear(x, self.output)


def rope_base(
    file: ModelFile, arch: str, name: str = "freq_base", default: float = 10000.0
) -> float:
    """`rope.<name>`.  Raises GGUFError: not above 1, so that no pair turns slower than another."""
    base: float = file.get_float(f"{arch}.rope.{name}", default)
    if not base > 1:
        raise GGUFError(f"{file.file}: {arch}.rope.{name} is {base}, not above 1")
    return base


def read_rope(
    file: ModelFile, h: Hparams, neox: bool, base: float | None = None, factors: F32 | None = None,
    scaled: bool = True,
) -> Rope:  # fmt: skip
    """The model's rotary embedding, its scaling included.

    `factors` f32 [n_rot / 2] divide the angles (Llama 3.1); `scaled` False ignores the scaling
    type and factor.
    Raises GGUFError: keys make no sense; UnsupportedError: an unknown kind of scaling.
    Source: llama.cpp ggml/src/ggml-cpu/ops.cpp, rope_yarn; ggml/src/ggml.c,
    ggml_rope_yarn_corr_dims; src/llama-context.cpp, the constructor (the magnitude).
    """
    key = f"{h.arch}.rope"
    n_rot: int = file.get_int(f"{key}.dimension_count", h.d_k)
    if n_rot < 2 or n_rot % 2 or n_rot > h.d_k:
        raise GGUFError(f"{file.file}: {key}.dimension_count is {n_rot}, not even and 2 to {h.d_k}")
    base = rope_base(file, h.arch) if base is None else base
    inv_freq = base ** (-2 * np.arange(n_rot // 2, dtype=np.float64) / n_rot)
    if factors is not None:
        if not ((factors > 0) & np.isfinite(factors)).all():
            raise GGUFError(f"{file.file}: rope_freqs.weight holds factors that are not above 0")
        inv_freq = inv_freq / factors
    magnitude = file.get_float(f"{key}.scaling.attn_factor", 1.0)
    if not magnitude > 0:
        raise GGUFError(f"{file.file}: {key}.scaling.attn_factor is {magnitude}, not above 0")
    kind, factor = _scaling(file, key) if scaled else ("none", 1.0)
    if kind == "linear":
        inv_freq = inv_freq / factor
    elif kind == "yarn":
        inv_freq = _yarn(file, h, inv_freq, base, factor)
        magnitude *= 1 + 0.1 * math.log(max(factor, 1.0))
    return Rope(neox, inv_freq, magnitude)


def _scaling(file: ModelFile, key: str) -> tuple[str, float]:
    """The kind of scaling, "none" where no factor is given, and its factor."""
    kind: str = file.get_str(f"{key}.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{file.file}: RoPE scaling '{kind}' is not known; linear and yarn are"
        )
    factor: float = file.get_float(
        f"{key}.scaling.factor", file.get_float(f"{key}.scale_linear", 0.0)
    )
    if factor < 0:
        raise GGUFError(f"{file.file}: {key}.scaling.factor is {factor}, not above 0")
    return (kind, factor) if factor else ("none", 1.0)


def _yarn(
    file: ModelFile, h: Hparams, inv_freq: NDArray[np.float64], base: float, factor: float
) -> NDArray[np.float64]:
    """Angles divided by `factor` for slow pairs, kept for fast ones, blended in between."""
    key = f"{h.arch}.rope.scaling.original_context_length"
    original: int = file.get_int(key, h.n_ctx)
    if original < 1:
        raise GGUFError(f"{file.file}: {key} is {original}, not above 0")
    n_rot = 2 * len(inv_freq)
    # the pair that makes 32 turns, and the one that makes a single turn, in the original context
    low, high = (
        n_rot * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (32, 1)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), n_rot - 1)
    slow = np.clip((np.arange(n_rot // 2) - low) / max(0.001, high - low), 0, 1)
    blended: NDArray[np.float64] = inv_freq / factor * slow + inv_freq * (1 - slow)
    return blended
