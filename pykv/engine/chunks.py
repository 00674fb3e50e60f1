"""A text's first tokens in chunks of one length, and reading one through a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pykv.backends.base import I32
from pykv.errors import ConfigError

if TYPE_CHECKING:
    from pykv.engine.model import Model


def first_chunks(model: Model, text: str | bytes, ctx_size: int, chunks: int | None) -> I32:
    """The text's first tokens, i32 [chunks, ctx_size]; each chunk begins with BOS if there is one.

    Raises ConfigError: the text or the context is too short, or the number of chunks is no number.
    """
    if ctx_size > model.n_ctx:
        raise ConfigError(f"a chunk of {ctx_size} tokens is longer than the context, {model.n_ctx}")
    if chunks is not None and chunks < 1:
        raise ConfigError(f"chunks must be 1 or more, or None for all, not {chunks}")
    ids = model.tokenizer.encode(text, add_special=False, parse_special=False)
    if len(ids) < ctx_size:
        raise ConfigError(
            f"the text has {len(ids)} tokens, and a chunk has {ctx_size}: give a longer text or a "
            "smaller --ctx-size"
        )
    whole = len(ids) // ctx_size * ctx_size
    tokens = np.array(ids[:whole], np.int32).reshape(-1, ctx_size)[:chunks]
    if model.tokenizer.add_bos and model.tokenizer.bos is not None:
        tokens[:, 0] = model.tokenizer.bos
    return tokens


def read_chunk(model: Model, chunk: I32) -> None:
    """Read a chunk into a sequence of its own, for whoever listens to the backend."""
    sequence, nothing = model.store.new_sequence(), np.empty(0, np.int32)
    try:
        for start in range(0, len(chunk), model.ubatch):
            model.step([(sequence, chunk[start : start + model.ubatch])], nothing)
    finally:
        model.store.free(sequence)
