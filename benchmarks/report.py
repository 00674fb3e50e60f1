"""What a measurement is, and how it is kept: every sample, with commit, machine and command."""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import llamacpp

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
SIGNS = {"≥": operator.ge, ">": operator.gt, "≤": operator.le}


@dataclass(frozen=True)
class Options:
    """How to measure."""

    repeat: int = 5
    threads: int = 2
    quick: bool = False  # small sizes, to see that a benchmark works; its figures mean nothing
    models: dict[str, Path] = field(default_factory=dict)
    subjects: tuple[str, ...] = ("smollm2", "gemma3")  # where a benchmark takes both models
    alone: bool = False  # without llama.cpp, be it installed
    # of the benchmarks of caches; empty: what each measures by default
    types: tuple[str, ...] = ()  # "q4_0", or keys and values: "kivi4/kivi2"
    tokens: tuple[int, ...] = ()  # depths, or lengths of prompts
    passes: tuple[tuple[int, int], ...] = ()  # chunks of a text, and their tokens
    prepare: bool = False  # only keep what llama.cpp's caches hold, for later runs
    data: Path | None = None  # folder of the text, and perhaps of llama.cpp's figures

    def size(self, full: int, small: int) -> int:
        """A size, or a small one for a quick run."""
        return small if self.quick else full


@dataclass(frozen=True)
class Bar:
    """What a figure must reach: the ratio, or the median of pykv's samples."""

    sign: str  # of SIGNS
    limit: float
    of: str = "ratio"

    def __str__(self) -> str:
        return f"{'' if self.of == 'ratio' else self.of + ' '}{self.sign} {self.limit:g}"


@dataclass
class Result:
    """Samples of pykv, and of what it is compared with, taken alternately."""

    benchmark: str
    what: str
    model: str
    unit: str
    samples: list[float]
    against: str = ""  # "llama.cpp", or another setting of pykv
    others: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    bar: Bar | None = None
    ratio_digits: int = 2  # after the point, in the table

    @property
    def median(self) -> float:
        """Of pykv's samples."""
        return statistics.median(self.samples)

    @property
    def ratio(self) -> float | None:
        """Median over median; None without another side."""
        return self.median / statistics.median(self.others) if self.others else None

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached; None without one."""
        if self.bar is None:
            return None
        figure = self.ratio if self.bar.of == "ratio" else self.median
        return figure is not None and bool(SIGNS[self.bar.sign](figure, self.bar.limit))


Benchmark = Callable[[Options], "Iterable[Result]"]


def _portable() -> list[str]:
    """The arguments, without folders of this machine."""
    words = sys.argv[1:]
    places = [i for i, word in enumerate(words) if word in ("--models", "--data")]
    return [word for i, word in enumerate(words) if i not in places and i - 1 not in places]


def command_output(*command: str) -> str:
    """What a command prints, or "" where it fails or is absent."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_name() -> str:
    """The processor's own name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Everything that a figure depends on besides the model and the settings."""
    packages = ("pykv", "numpy", "numba", "llvmlite")
    versions = {name: _version(name) for name in packages}
    return {
        "commit": command_output("git", "rev-parse", "HEAD") or "unknown",
        "changed": bool(command_output("git", "status", "--porcelain")),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions | {"llama_cpp": llamacpp.version()},
        "command": " ".join(["python -m benchmarks." + Path(sys.argv[0]).stem, *_portable()]),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def keep(
    results: Iterable[Result],
    options: Options,
    folder: Path = RESULTS,
    about: dict[str, Any] | None = None,
) -> Path:
    """Append a line of JSON per result to <host>.jsonl; returns the file.

    `about` is what `machine` said before the first was measured, when the code was read.
    """
    about = machine() if about is None else about
    now = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
    target = folder / f"{platform.node() or 'unknown'}.jsonl"
    folder.mkdir(exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        for result in results:
            path = options.models.get(result.model)
            record = {
                "benchmark": result.benchmark,
                "what": result.what,
                "model": result.model,
                "file": path.name if path else None,
                "unit": result.unit,
                "threads": options.threads,
                "quick": options.quick,
                "n": len(result.samples),
                "median": result.median,
                "ratio": result.ratio,
                "bar": result.bar and f"{result.bar.of} {result.bar.sign} {result.bar.limit:g}",
                "met": result.met,
                "samples": result.samples,
                "against": result.against,
                "others": result.others,
                "notes": result.notes,
                **about,
                **now,
            }
            file.write(json.dumps(record) + "\n")
    return target


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table of medians, with a column of bars where there are any."""
    bars = any(r.bar is not None for r in results)
    lines = [
        "| | model | pykv | against | | ratio | unit | n |" + " bar |" * bars,
        "|---|---|---|---|---|---|---|---|" + "---|" * bars,
    ]
    for r in results:
        digits = max(4, r.ratio_digits + 2)
        other = f"{statistics.median(r.others):.{digits}g}" if r.others else ""
        ratio = "" if r.ratio is None else f"{r.ratio:.{r.ratio_digits}f}"
        cells = [r.what, r.model, f"{r.median:.{digits}g}", r.against, other, ratio, r.unit]
        cells.append(str(len(r.samples)))
        if bars:
            missed = " **missed**" if r.met is False else ""
            cells.append("" if r.bar is None else f"{r.bar}{missed}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
