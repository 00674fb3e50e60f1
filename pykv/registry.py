"""The file's name is the key: `find("formats", "q4_0")` is `pykv/formats/q4_0.py`.

A plugin adds a name through an entry point of the group `pykv.<folder>`; nothing registers itself.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from pykv.errors import UnsupportedError

_NOT_KEYS = {"base", "blocks", "coded"}


@cache
def _plugins(folder: str) -> dict[str, EntryPoint]:
    """The entry points of a folder; looking through all installed packages takes milliseconds."""
    return {e.name: e for e in entry_points(group=f"pykv.{folder}")}


def names(folder: str) -> list[str]:
    """Every key of a folder, sorted: its modules that are not machinery, and plugins."""
    return list(_names(folder))


@cache
def _names(folder: str) -> tuple[str, ...]:
    package = importlib.import_module(f"pykv.{folder}")
    own = {m.name for m in pkgutil.iter_modules(package.__path__)} - _NOT_KEYS
    return tuple(sorted(own | set(_plugins(folder))))


def find(folder: str, name: str, what: str, also: tuple[str, ...] = ()) -> ModuleType:
    """The module that implements `name`.

    Raises UnsupportedError when there is none; `what` names the kind of thing in the sentence, and
    `also` are names that the caller knows without a module.
    """
    if name not in _NOT_KEYS and name.isidentifier():
        if name in _plugins(folder):
            module: ModuleType = _plugins(folder)[name].load()
            return module
        # only the absence of this very module means "unknown": other import errors are bugs
        if importlib.util.find_spec(f"pykv.{folder}.{name}") is not None:
            return importlib.import_module(f"pykv.{folder}.{name}")
    known = sorted([*names(folder), *also])
    close = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UnsupportedError(f"unknown {what} '{name}': known are {', '.join(known)}{hint}")
