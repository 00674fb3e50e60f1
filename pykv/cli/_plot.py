"""Pictures, which matplotlib draws: what they need, before a run and after it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError

PICTURES = (".png", ".pdf", ".svg")


def check(path: str) -> None:
    """Raise ConfigError where no picture could be saved under that name."""
    if Path(path).suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot {path}: the file's name must end in {', '.join(PICTURES)}")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--plot {path}: there is no such folder, create it first")
    if Path(path).is_dir():
        raise ConfigError(f"--plot {path}: this is a folder, name a file")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ConfigError(f"--plot {path}: it cannot be written, choose another place")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            '--plot draws with matplotlib, which is not here: pip install "pykv[plot]"'
        )


def figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    # a figure by itself, without pyplot, opens no window and keeps nothing
    make: Any = importlib.import_module("matplotlib.figure").Figure
    return make(figsize=(width, height), layout="constrained")


def save(drawn: Any, path: str) -> None:
    """Write the figure.  Raises OSError, with the path."""
    try:
        drawn.savefig(path, dpi=150)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
