"""Runs benchmarks: `python -m benchmarks.run [NAME...]`; prints a table, keeps every sample."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import llamacpp
from benchmarks.registry import BENCHMARKS
from benchmarks.report import Options, Result, keep, table
from pykv.engine import hub

CATALOGUE = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    p.add_argument("--list", action="store_true", help="say what each measures")
    p.add_argument("-n", "--repeat", type=int, default=5, help="samples of each (5)")
    p.add_argument("-t", "--threads", type=int, default=2, help="threads of both sides (2)")
    p.add_argument("--quick", action="store_true", help="tiny sizes, one sample, nothing is kept")
    p.add_argument("--models", type=Path, help="folder of both GGUF files, if not pykv's own")
    return p


def options_of(args: argparse.Namespace) -> Options:
    """Settings from the command line.  Exits where a model is not here."""
    folder = args.models or hub.models_dir()
    models = {name: folder / hub.find(key).file for name, key in CATALOGUE.items()}
    for path in models.values():
        if not path.is_file():
            sys.exit(f"{path} is not here: run `pykv pull` for both models, or give --models")
    return Options(1 if args.quick else args.repeat, args.threads, args.quick, models)


def chosen(names: Sequence[str]) -> list[str]:
    """The names, or all of them.  Exits for an unknown one."""
    unknown = [n for n in names if n not in BENCHMARKS]
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]}: known are {', '.join(BENCHMARKS)}")
    return list(names) or list(BENCHMARKS)


def measure(names: Sequence[str], options: Options) -> list[Result]:
    """Run benchmarks one after the other, print the table and keep the samples."""
    if not llamacpp.available():
        print("llama-cpp-python is not installed: no comparison", file=sys.stderr)
    results: list[Result] = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results += BENCHMARKS[name].run(options)
    print(table(results))
    if not options.quick:
        print(f"kept in {keep(results, options)}", file=sys.stderr)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point."""
    args = parser().parse_args(argv)
    if args.list:
        for name, entry in BENCHMARKS.items():
            print(f"{name:8}  {entry.what}")
        return 0
    measure(chosen(args.names), options_of(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
