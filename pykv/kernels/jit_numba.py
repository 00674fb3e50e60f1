"""The one place for Numba's flags and its on-disk cache.

A kernel is a C function `void(ctx, task, worker)`: `ctx` is the address of 8-byte parameters,
`task` the number of the piece of work, `worker` a small number that no other running task of the
same launch has, for scratch memory. It is copied from a module-level template whose free names are
bound in the copy's globals and whose `__qualname__` names them, because Numba finds neither a
closure over jitted functions nor two copies of one name in its cache. The compiled code lies in a
folder named by a hash of the kernel sources, since Numba does not see changes in the files that a
kernel calls into.

Source: numba/core/caching.py, `_CacheLocator` and `FunctionCache` (the hooks used here).
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import platformdirs
from numba import njit
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
)
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

log = logging.getLogger("pykv")

# "contract", "reassoc" and their like are absent on purpose: a kernel says `fma` where it wants
# one, so that every copy of a loop adds in the same order and rounds in the same places.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True}
SIGNATURE = numba.types.void(numba.types.intp, numba.types.intp, numba.types.intp)

device = njit(**OPTIONS)  # a function that kernels call; never called from Python
inlined = njit(**OPTIONS, forceinline=True)  # the same, where a call would cost


class Compiled:
    """What was compiled since the process began: the kernels' names and the seconds spent."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seconds = 0.0
        self.listener: Callable[[str], None] | None = None  # told a name before it compiles
        self.told = False  # that they cannot be kept


compiled = Compiled()
_folder: Path | None = None
_bound: dict[str, Any] = {}
_loaded: dict[tuple[Path, str], Any] = {}  # machine code is never given back: load it once


def sources_hash() -> str:
    """A hash of every kernel source, of Numba's, LLVM's and Python's version."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if not file.name.endswith("_triton.py"):
            digest.update(file.name.encode() + file.read_bytes())
    digest.update(f"{numba.__version__} {llvmlite.__version__} {sys.version}".encode())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where compiled kernels lie: a `kernels` folder in the user's cache."""
    global _folder
    if _folder is None:
        _folder = Path(platformdirs.user_cache_dir("pykv")) / "kernels" / sources_hash()
    return _folder


def set_cache_folder(root: Path) -> None:
    """Keep compiled kernels under `root` instead of the user's cache folder."""
    global _folder
    _folder = root / "kernels" / sources_hash()


class _Locator(_CacheLocator):  # type: ignore[misc]
    def __init__(self, py_func: Any, py_file: str) -> None:
        self._name = py_func.__qualname__

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return "in the folder's name"

    def get_disambiguator(self) -> str:
        return hashlib.sha256(self._name.encode()).hexdigest()[:8]

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _Impl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]


class _File(IndexDataCacheFile):  # type: ignore[misc]
    """A kernel's index and data, each with a hash at its end; what is damaged counts as absent."""

    def _dump(self, obj: Any) -> bytes:
        data: bytes = super()._dump(obj)
        return data + hashlib.sha256(data).digest()

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(data[:-32]).digest() != data[-32:]:
            raise FileNotFoundError(f"{name} is damaged")
        return pickle.loads(data[:-32])

    def _load_index(self) -> Any:
        try:
            return self._load_data(self._index_name)
        except OSError:
            return {}

    def _save_index(self, overloads: Any) -> None:
        self._save_data(self._index_name, overloads)


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Impl

    def __init__(self, py_func: Any) -> None:
        super().__init__(py_func)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _File(self._cache_path, self._impl.filename_base, stamp)
        self._kernel = py_func.__qualname__
        self._started = 0.0

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        data = None
        # not Numba's own refresh: that imports what compiling needs, a quarter of a second of every
        # start, and compiling asks for it again; loaded code needs the runtime's symbols only
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            data = self._load_overload(sig, target_context)
        if data is None:
            self._started = time.perf_counter()
            if compiled.listener is not None:
                compiled.listener(self._kernel)
        return data

    def save_overload(self, sig: Any, data: Any) -> None:
        compiled.names.append(self._kernel)
        compiled.seconds += time.perf_counter() - self._started
        # a full or read-only disk costs the next start its compile time, and nothing else
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self.disable()
            if not compiled.told:
                compiled.told = True
                log.warning(
                    "%s: compiled kernels cannot be kept there (%s), and the next start will "
                    "compile them again", cache_folder(), error.strerror or error,
                )  # fmt: skip


def has_features(*names: str) -> bool:
    """Whether the CPU that Numba compiles for has all of these, in LLVM's names."""
    codegen = cpu_target.target_context.codegen()
    features = codegen.magic_tuple()[2].split(",")
    return all(f"+{name}" in features for name in names)


def bind(template: Callable[..., Any], name: str, **names: Any) -> types.FunctionType:
    """A copy of `template` called `name`, with `names` bound as globals."""
    copy = types.FunctionType(
        template.__code__, {**template.__globals__, **names}, name, template.__defaults__
    )
    copy.__qualname__ = name
    copy.__module__ = template.__module__
    return copy


def bound(template: Callable[..., Any], name: str, **names: Any) -> Any:
    """A function for kernels to call: `template` with `names` bound, made once in a process."""
    if name not in _bound:
        _bound[name] = device(bind(template, name, **names))
    return _bound[name]


def loaded(name: str) -> CFunc | None:
    """The kernel `name`, if this process has it already."""
    known: CFunc | None = _loaded.get((cache_folder(), name))
    return known


def kernel(template: Callable[..., Any], name: str, **names: Any) -> CFunc:
    """Compile, or load, the kernel `name`: `template(ctx, task, worker)` with `names` bound.

    A process loads it once: Numba never gives machine code back.
    """
    known = loaded(name)
    if known is not None:
        return known
    function = CFunc(
        bind(template, name, **names), (SIGNATURE.args, SIGNATURE.return_type), {}, OPTIONS
    )
    function._cache = _Cache(function._pyfunc)
    function.compile()
    _loaded[cache_folder(), name] = function
    return function


def entry(template: Callable[..., Any], name: str, signature: Any, **options: Any) -> Any:
    """Compile, or load, a function that Python calls, with one fixed signature."""
    if (cache_folder(), name) in _loaded:
        return _loaded[cache_folder(), name]
    dispatcher = njit(**OPTIONS, **options)(bind(template, name))
    dispatcher._cache = _Cache(dispatcher.py_func)
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    _loaded[cache_folder(), name] = dispatcher
    return dispatcher
