"""What a whole process costs: starting, compiling, memory, opening a file, importing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Options, Result
from pykv.gguf import open_gguf

POLL_S = 0.005
MIB = 2**20


def _command(options: Options, name: str, *args: str) -> list[str]:
    return [
        sys.executable, "-m", "pykv", "generate", "-m", str(options.models[name]),
        "-t", str(options.threads), "--temp", "0", *args,
    ]  # fmt: skip


def _seconds(command: list[str], environ: dict[str, str] | None = None) -> tuple[float, str]:
    """Wall time of a process, and what it said on standard error."""
    started = time.perf_counter()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, done.stderr


def start(options: Options) -> list[Result]:
    """`pykv generate -p Hello -n 1`, kernels compiled before."""
    results = []
    for name in options.subjects:
        command = _command(options, name, "-p", "Hello", "-n", "1")
        _seconds(command)
        samples = [_seconds(command)[0] for _ in range(options.repeat)]
        results.append(Result("start", "whole process: generate -p Hello -n 1", name, "s", samples))
    return results


def compile(options: Options) -> list[Result]:
    """The first run on a machine: an empty cache folder of its own."""
    results = []
    for name in options.subjects:
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, "PYKV_CACHE_DIR": folder}
            command = _command(options, name, "-p", "Hello", "-n", "1")
            seconds, said = _seconds(command, environ)
        told = "compiling" in said
        results.append(
            Result(
                "compile", "the same, first run ever", name, "s", [seconds], notes={"told": told}
            )
        )
    return results


def memory(options: Options) -> list[Result]:
    """Peak memory beyond the mapped model file and the cache: a prompt, then decoding."""
    if not Path("/proc/self/smaps").exists():
        raise SystemExit("memory: this benchmark reads /proc, which this system does not have")
    text = "The quick brown fox jumps over the lazy dog. " * options.size(50, 4)
    results = []
    for name in options.subjects:
        args = ("-p", text, "-n", str(options.size(64, 4)), "--json")
        _seconds(_command(options, name, *args))
        anonymous, beyond = [], []
        for _ in range(options.repeat):
            peak_anonymous, peak, cache = _peaks(
                _command(options, name, *args), options.models[name]
            )
            anonymous.append((peak_anonymous - cache) / MIB)
            beyond.append((peak - cache) / MIB)
        results += [
            Result("memory", "peak anonymous memory less the cache", name, "MiB", anonymous),
            Result(
                "memory", "peak resident less the model file and the cache", name, "MiB", beyond
            ),
        ]
    return results


def _peaks(command: list[str], model: Path) -> tuple[int, int, int]:
    """Peak anonymous bytes, peak resident bytes but the model file's, and the cache's bytes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    folder, anonymous, other = Path(f"/proc/{process.pid}"), 0, 0
    while process.poll() is None:
        try:
            smaps = (folder / "smaps").read_text()
        except OSError:  # it has just ended
            break
        now_anonymous, now_other = _resident(smaps, model.resolve())
        anonymous, other = max(anonymous, now_anonymous), max(other, now_other)
        time.sleep(POLL_S)
    out, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return anonymous, other, json.loads(out)["stats"]["cache_reserved_bytes"]


def _resident(smaps: str, model: Path) -> tuple[int, int]:
    """Anonymous bytes, and resident bytes outside the model file."""
    anonymous, other, in_model = 0, 0, False
    for line in smaps.splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            in_model = line.endswith(str(model))
        elif word == "Rss:" and not in_model:
            other += int(rest.split()[0]) * 1024
        elif word == "Anonymous:":
            anonymous += int(rest.split()[0]) * 1024
    return anonymous, other


def opening(options: Options) -> list[Result]:
    """The header of a file with 262,144 tokens, parsed and checked."""
    samples = []
    for _ in range(options.repeat + 1):
        started = time.perf_counter()
        with open_gguf(options.models["gemma3"]):
            samples.append(time.perf_counter() - started)
    return [Result("open", "open the GGUF file", "gemma3", "s", samples[1:])]


def importing(options: Options) -> list[Result]:
    """`import pykv`, in a fresh interpreter."""
    code = (
        "import time; t = time.perf_counter(); import pykv; "
        "import sys; sys.stdout.write(str(time.perf_counter() - t))"
    )
    command = [sys.executable, "-c", code]
    samples = [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(options.repeat + 1)
    ]
    return [Result("import", "import pykv", "", "s", samples[1:])]
