"""Runs a benchmark's tests first, and reports no speed on a red one.

`python -m benchmarks.verify [NAME...]` takes what `benchmarks.run` takes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from benchmarks import run
from benchmarks.registry import BENCHMARKS
from benchmarks.report import ROOT

NO_TESTS = 5  # pytest's exit code


def red(paths: Sequence[str]) -> str | None:
    """Why these tests do not count as passed, or None.  A path without a test counts as red."""
    missing = [p for p in paths if not (ROOT / p).exists()]
    if missing:
        return f"{missing[0]} does not exist"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *paths], cwd=ROOT)
    if done.returncode == NO_TESTS:
        return f"no test was run of {' '.join(paths)}"
    return f"{' '.join(paths)} failed" if done.returncode else None


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point."""
    args = run.parser().parse_args(argv)
    names, options = run.chosen(args.names), run.options_of(args)
    paths = list(dict.fromkeys(path for name in names for path in BENCHMARKS[name].tests))
    reason = red(paths)
    if reason is not None:
        print(f"nothing is measured: {reason}", file=sys.stderr)
        return 1
    run.measure(names, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
