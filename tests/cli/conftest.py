import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import Terminal

from pykv.cli import app

HERE = Path(__file__).parent
START = (
    "import importlib.util, sys\n"
    "if sys.stdin.isatty():\n"
    "    import fcntl, termios\n"
    "    fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl-C typed there is a signal here
    f"spec = importlib.util.spec_from_file_location('pykv.engine.model', {str(HERE)!r}"
    " + '/fake_engine.py')\n"
    "fake = importlib.util.module_from_spec(spec)\n"
    "sys.modules['pykv.engine.model'] = fake\n"
    "spec.loader.exec_module(fake)\n"
    "from pykv.cli.app import main\n"
    "sys.exit(main())\n"
)


REAL = (
    "import sys\n"
    "if sys.stdin.isatty():\n"
    "    import fcntl, termios\n"
    "    fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl-C typed there is a signal here
    "from pykv.cli.app import main\n"
    "sys.exit(main())\n"
)
COMPILING = "compiling kernels, once on this machine\n"


@pytest.fixture
def engine(monkeypatch):
    """The fake engine, in the place of the real one."""
    spec = importlib.util.spec_from_file_location("pykv.engine.model", HERE / "fake_engine.py")
    fake = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pykv.engine.model", fake)
    spec.loader.exec_module(fake)
    return fake


class Stream(io.TextIOWrapper):
    """A stream in memory that can claim to be a terminal."""

    def __init__(self, data=b"", tty=False, encoding="utf-8"):
        super().__init__(io.BytesIO(data), encoding=encoding, newline="")
        self._tty = tty

    def isatty(self):
        return self._tty

    def written(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def pykv(engine, monkeypatch, tmp_path):
    """Runs a command line inside this process: exit code, both streams, and the engine's calls."""
    monkeypatch.delenv("PYKV_MODEL", raising=False)
    monkeypatch.setenv("PYKV_CACHE_DIR", str(tmp_path / "cache"))

    def run(*args, stdin=None, tty=False):
        streams = {
            "stdin": Stream(stdin or b"", tty=stdin is None),
            "stdout": Stream(tty=tty),
            "stderr": Stream(),
        }
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            code = app.run([str(a) for a in args])
        return SimpleNamespace(
            code=code,
            out=streams["stdout"].written(),
            err=streams["stderr"].written(),
            calls=engine.calls,
        )

    return run


@pytest.fixture
def keyboard(pykv, monkeypatch):
    """Runs `pykv chat` with lines typed at a keyboard; an exception in the list is raised."""

    def run(*lines, args=()):
        pending = list(lines)

        def typed(prompt=""):
            if not pending:
                raise EOFError
            line = pending.pop(0)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", typed)
        result = pykv("chat", *args)
        result.left = pending
        return result

    return run


@pytest.fixture
def process(tmp_path):
    """Starts the program with the fake engine as a process of its own."""

    def start(*args, **settings):
        env = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "TERM": "xterm", "LANG": "C.UTF-8"}
        env.pop("PYKV_MODEL", None)
        settings.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen([sys.executable, "-c", START, *args], env=env, **settings)

    return start


@pytest.fixture
def terminal(process):
    """Starts the program with the fake engine at a terminal of its own."""
    opened = []

    def start(*args):
        opened.append(Terminal(process, *args))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture(scope="session")
def small():
    """The module that writes the engine's small models."""
    path = HERE.parents[1] / "tests" / "engine" / "small_model.py"
    spec = importlib.util.spec_from_file_location("small_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reciter(small, tmp_path_factory):
    """A small model that recites a known text."""
    return str(small.write_model(tmp_path_factory.mktemp("models") / "small.gguf", recite=True))


@pytest.fixture
def start():
    """Starts `pykv` with arguments as a process of its own; ends what still runs."""
    running = []

    def begin(*args, env=None, **settings):
        environ = os.environ | {
            "PYTHONPATH": str(HERE.parents[1]),
            "TERM": "xterm",
            "LANG": "C.UTF-8",
        }
        environ.pop("PYKV_MODEL", None)
        settings.setdefault("stdin", subprocess.DEVNULL)
        command = [sys.executable, "-c", REAL, *map(str, args)]
        running.append(subprocess.Popen(command, env=environ | (env or {}), **settings))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()
        for stream in process.stdin, process.stdout, process.stderr:
            if stream is not None:
                stream.close()


@pytest.fixture
def run(start):
    """Runs `pykv` to its end: exit code, standard output and standard error."""

    def finish(*args, stdin=None, env=None):
        process = start(
            *args, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = process.communicate(stdin, timeout=100)
        return process.returncode, out.decode(), err.decode().replace(COMPILING, "")

    return finish
