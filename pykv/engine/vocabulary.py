"""A file's vocabulary alone."""

from __future__ import annotations

import os

from pykv.gguf import open_gguf
from pykv.tokenizer import Tokenizer, from_metadata


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file, which may hold a vocabulary only.

    Raises GGUFError, TokenizerError, UnsupportedError.
    """
    with open_gguf(path) as file:
        return from_metadata(file.metadata, where=file.file)
