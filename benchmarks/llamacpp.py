"""llama.cpp through the low-level functions of llama-cpp-python, the other side of a comparison.

Source: llama.cpp include/llama.h.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def available() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def version() -> str | None:
    """The package's version, or None."""
    if not available():
        return None
    import llama_cpp

    return str(llama_cpp.__version__)


def has_type(name: str) -> bool:
    """Whether its cache takes a type of this name on a CPU."""
    return name in CACHE_TYPES


class Peer:
    """A model and a context with flash attention; `types` are those of its keys and values."""

    def __init__(
        self,
        path: str,
        n_ctx: int,
        threads: int,
        n_batch: int = 512,
        types: tuple[str, str] = ("f16", "f16"),
    ) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        # the callback must outlive the model
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
        params.n_threads = params.n_threads_batch = threads
        params.type_k, params.type_v = (
            int(getattr(llama_cpp, f"GGML_TYPE_{name.upper()}")) for name in types
        )
        params.flash_attn_type = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens to the cache, in one batch."""
        array = (self._lib.llama_token * len(tokens))(*tokens)
        batch = self._lib.llama_batch_get_one(array, len(tokens))
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def greedy(self) -> int:
        """The likeliest token after the last one that was read."""
        pointer = self._lib.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(pointer, (self._n_vocab,)).argmax())

    def truncate(self, n: int) -> None:
        """Keep the first n tokens of the cache."""
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_seq_rm(memory, 0, n, -1)

    def save(self, file: Path) -> None:
        """Write what the cache holds."""
        file.parent.mkdir(parents=True, exist_ok=True)
        # whole under its name, or not there: a file of half a cache would be believed
        part = file.with_suffix(".part")
        name = str(part).encode()
        if not self._lib.llama_state_seq_save_file(self._context, name, 0, None, 0):
            raise RuntimeError(f"llama.cpp cannot write {part}")
        part.replace(file)

    def restore(self, file: Path) -> None:
        """Hold what `save` wrote, of the same model and the same types."""
        self.truncate(0)
        count, name = ctypes.c_size_t(), str(file).encode()
        # without room for tokens, be there none in the file, only their number is read
        room = (self._lib.llama_token * 1)()
        read = self._lib.llama_state_seq_load_file(
            self._context, name, 0, room, 1, ctypes.byref(count)
        )
        if not read or not self.length:
            raise RuntimeError(f"llama.cpp cannot read {file}: delete it")

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        memory = self._lib.llama_get_memory(self._context)
        return int(self._lib.llama_memory_seq_pos_max(memory, 0)) + 1

    def close(self) -> None:
        """Give back the context and the model."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
