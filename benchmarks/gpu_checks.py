"""Correctness for benchmarks/gpu.py: the tests of tests/gpu in several processes, and tokens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT

PROCESSES = 8  # compiling takes most of the time
# warnings of another torch are no errors here, and nothing is written to the repository
PYTEST = (
    sys.executable, "-u", "-m", "pytest", "tests/gpu", "-m", "gpu and not models", "-q",
    "-W", "default", "-p", "no:cacheprovider", "-p", "no:randomly",
)  # fmt: skip
RESULT = re.compile(r"^(?:\S*/)?tests/gpu/\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/gpu/\S+.*)$", re.MULTILINE)


class Suite:
    """The tests of tests/gpu, which run from now on beside what follows."""

    def __init__(self, limit: float) -> None:
        self._began, self._running, self._tests = time.monotonic(), [], list[str]()
        self._why = ""  # nothing runs
        self._folder = tempfile.TemporaryDirectory()
        try:
            listed = subprocess.run(
                [*PYTEST, "--collect-only"], cwd=ROOT, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            self._why = "the tests could not be listed in time"
            return
        self._tests = [line for line in listed.stdout.splitlines() if "::" in line]
        if listed.returncode or not self._tests:
            last = (listed.stdout + listed.stderr).strip().splitlines()[-1:]
            self._why = " ".join(last).replace("|", "/")[:200]
            return
        parts = [self._tests[i::PROCESSES] for i in range(min(PROCESSES, len(self._tests)))]
        self._logs = [Path(self._folder.name, f"{i}.log") for i in range(len(parts))]
        self._running = [
            _started(part, log) for part, log in zip(parts, self._logs, strict=True)
        ]  # fmt: skip

    def result(self, limit: float) -> tuple[bool | None, str]:
        """Whether all passed, None where that is not known, and a sentence; ends what runs on."""
        if not self._running:
            return None, f"**not run**: {self._why}"
        in_time = _wait(self._running, limit)
        text = "\n".join(log.read_text("utf-8", errors="replace") for log in self._logs)
        self._folder.cleanup()
        return _verdict(text, len(self._tests), in_time, time.monotonic() - self._began)


def _started(tests: Sequence[str], log: Path) -> subprocess.Popen[Any]:
    command = [word for word in PYTEST if word not in ("tests/gpu", "-q")]
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(
            [*command, "-v", "--tb=line", *tests], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )


def _wait(running: Sequence[subprocess.Popen[Any]], seconds: float) -> bool:
    """Whether all ended in time; the others are ended."""
    end, in_time = time.monotonic() + seconds, True
    for process in running:
        try:
            process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            in_time = False
            process.kill()
            process.wait()
    return in_time


def _verdict(text: str, n: int, in_time: bool, seconds: float) -> tuple[bool | None, str]:
    results = RESULT.findall(text)
    counts = {word: results.count(word) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    said = ", ".join(f"{count} {word.lower()}" for word, count in counts.items() if count)
    said = f"{said or 'nothing ended'} of {n}, {seconds:.0f} s"
    wrong = counts["FAILED"] + counts["ERROR"]
    if wrong:
        names = [name.split(" - ")[0].rpartition("/")[2] for name in FAILED.findall(text)]
        return False, f"**{said}**: {', '.join(dict.fromkeys(names))}".replace("|", "/")
    if counts["PASSED"] < n:
        why = "a process ended early or tests were skipped" if in_time else "out of time"
        return None, f"**{said}** ({why})"
    return True, said


class CpuTokens:
    """The CPU backend's greedy tokens, from a process that runs beside the tests."""

    why = ""  # no tokens came

    def __init__(self, model: Path, n: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_model", str(model), str(n)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tokens(self, seconds: float) -> list[int] | None:
        """Wait for them; None: they did not come."""
        try:
            out, errors = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            self.why = "out of time"
            return None
        if self._process.returncode:
            self.why = " ".join(errors.strip().splitlines()[-1:]).replace("|", "/")[:200]
            return None
        found: list[int] = json.loads(out.splitlines()[-1])
        return found


def compared(found: Sequence[int], expected: Sequence[int]) -> str:
    """Whether tokens are the same, and where they part."""
    if list(found) == list(expected):
        return f"the same {len(expected)}"
    pairs = zip(found, expected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    return f"**differ** after {same} of {len(expected)}"
