"""pykv runs GGUF language models, and takes the KV cache seriously.

    import pykv
    with pykv.load("model.gguf") as model:
        for piece in model.generate("Once upon a time", max_tokens=32):
            print(piece, end="")

Importing pykv imports nothing else: names are fetched on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "load": "pykv.engine.model",
    "Model": "pykv.engine.model",
    "load_tokenizer": "pykv.engine.model",
    "Chat": "pykv.engine.chat",
    "Generation": "pykv.engine.session",
    "Session": "pykv.engine.session",
    "Stats": "pykv.engine.stats",
    "CacheConfig": "pykv.config",
    "LoadConfig": "pykv.config",
    "SamplingConfig": "pykv.config",
    "PykvError": "pykv.errors",
    "GGUFError": "pykv.errors",
    "UnsupportedError": "pykv.errors",
    "FormatError": "pykv.errors",
    "TokenizerError": "pykv.errors",
    "TemplateError": "pykv.errors",
    "ConfigError": "pykv.errors",
    "CacheFullError": "pykv.errors",
    "OutOfMemoryError": "pykv.errors",
    "NumericsError": "pykv.errors",
    "DownloadError": "pykv.errors",
    "CancelledError": "pykv.errors",
}

__all__ = [
    "CacheConfig",
    "CacheFullError",
    "CancelledError",
    "Chat",
    "ConfigError",
    "DownloadError",
    "FormatError",
    "GGUFError",
    "Generation",
    "LoadConfig",
    "Model",
    "NumericsError",
    "OutOfMemoryError",
    "PykvError",
    "SamplingConfig",
    "Session",
    "Stats",
    "TemplateError",
    "TokenizerError",
    "UnsupportedError",
    "load",
    "load_tokenizer",
]

if TYPE_CHECKING:
    from pykv.config import CacheConfig, LoadConfig, SamplingConfig
    from pykv.engine.chat import Chat
    from pykv.engine.model import Model, load, load_tokenizer
    from pykv.engine.session import Generation, Session
    from pykv.engine.stats import Stats
    from pykv.errors import (
        CacheFullError,
        CancelledError,
        ConfigError,
        DownloadError,
        FormatError,
        GGUFError,
        NumericsError,
        OutOfMemoryError,
        PykvError,
        TemplateError,
        TokenizerError,
        UnsupportedError,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pykv' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
