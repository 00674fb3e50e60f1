"""What a measurement is, and how it is kept: every sample, with commit, machine and command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import llamacpp

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Options:
    """How to measure."""

    repeat: int = 5
    threads: int = 2
    quick: bool = False  # small sizes, to see that a benchmark works; its figures mean nothing
    models: dict[str, Path] = field(default_factory=dict)

    def size(self, full: int, small: int) -> int:
        """A size, or a small one for a quick run."""
        return small if self.quick else full


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

    @property
    def median(self) -> float:
        """Of pykv's samples."""
        return statistics.median(self.samples)

    @property
    def ratio(self) -> float | None:
        """Median over median; None without another side."""
        return self.median / statistics.median(self.others) if self.others else None


Benchmark = Callable[[Options], "list[Result]"]


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
        "command": " ".join(["python -m benchmarks." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def keep(results: Sequence[Result], options: Options, folder: Path = RESULTS) -> Path:
    """Append a line of JSON per result to <host>.jsonl; returns the file."""
    about = machine()
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
                "samples": result.samples,
                "against": result.against,
                "others": result.others,
                "notes": result.notes,
                **about,
            }
            file.write(json.dumps(record) + "\n")
    return target


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table of medians."""
    lines = [
        "| | model | pykv | against | | ratio | unit | n |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        other = f"{statistics.median(r.others):.4g}" if r.others else ""
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        cells = (r.what, r.model, f"{r.median:.4g}", r.against, other, ratio, r.unit)
        lines.append(f"| {' | '.join(cells)} | {len(r.samples)} |")
    return "\n".join(lines)
