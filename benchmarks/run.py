"""Runs benchmarks: `python -m benchmarks.run [NAME...]`; prints a table, keeps every sample."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import llamacpp
from benchmarks.caches import cache_of
from benchmarks.registry import BENCHMARKS
from benchmarks.report import Options, Result, keep, machine, table
from pykv.cache import layout
from pykv.engine import hub
from pykv.errors import ConfigError

CATALOGUE = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}


def words(text: str) -> tuple[str, ...]:
    """Of a list with commas."""
    return tuple(word.strip() for word in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """The same of numbers from 1 on.  Raises ValueError."""
    found = tuple(int(word) for word in words(text))
    if min(found) < 1:
        raise ValueError(text)
    return found


def passes(text: str) -> tuple[tuple[int, int], ...]:
    """Chunks and tokens: 16x512,4x2048.  Raises ValueError."""
    parts = (numbers(word.replace("x", ",")) for word in words(text))
    return tuple((chunks, tokens) for chunks, tokens in parts)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    p.add_argument("--list", action="store_true", help="say what each measures")
    p.add_argument("-n", "--repeat", type=int, default=5, help="samples of each (5)")
    p.add_argument("-t", "--threads", type=int, default=2, help="threads of both sides (2)")
    p.add_argument("--quick", action="store_true", help="tiny sizes, one sample, nothing is kept")
    p.add_argument("--models", type=Path, help="folder of both GGUF files, if not pykv's own")
    p.add_argument(
        "--model", choices=CATALOGUE,
        help="only this one, where a benchmark takes both",
    )  # fmt: skip
    p.add_argument("--alone", action="store_true", help="without llama.cpp")
    caches = p.add_argument_group("pieces of the benchmarks cache-*")
    caches.add_argument(
        "--types", type=words, default=(), metavar="TYPE,...",
        help="only these cache types, beside f16; q4_0, or keys and values: kivi4/kivi2",
    )  # fmt: skip
    caches.add_argument(
        "--tokens", type=numbers, default=(), metavar="N,...",
        help="tokens in the cache (4096; cache-kernel 65536), prompts of cache-prompt (512,4096)",
    )  # fmt: skip
    caches.add_argument(
        "--passes", type=passes, default=(), metavar="CHUNKSxTOKENS,...",
        help="of cache-quality over the text (16x512,4x2048; gemma3 16x512)",
    )  # fmt: skip
    caches.add_argument(
        "--prepare", action="store_true",
        help="cache-decode: only read llama.cpp's tokens, and keep its caches for later runs",
    )  # fmt: skip
    caches.add_argument(
        "--data", type=Path, metavar="FOLDER",
        help="cache-quality: where wikitext2.test.txt lies, and perhaps reference.json",
    )  # fmt: skip
    return p


def options_of(args: argparse.Namespace) -> Options:
    """Settings from the command line.  Exits where a model is not here, or a type is unknown."""
    folder = args.models or hub.models_dir()
    models = {name: folder / hub.find(key).file for name, key in CATALOGUE.items()}
    for path in models.values():
        if not path.is_file():
            sys.exit(f"{path} is not here: run `pykv pull` for both models, or give --models")
    for label in args.types:
        try:
            layout.check(cache_of(label))
        except ConfigError as error:
            sys.exit(f"--types {label}: {error}")
    if args.prepare and not llamacpp.available():
        sys.exit("--prepare reads tokens with llama.cpp: install llama-cpp-python")
    return Options(
        repeat=1 if args.quick else args.repeat,
        threads=args.threads,
        quick=args.quick,
        models=models,
        subjects=(args.model,) if args.model else tuple(CATALOGUE),
        alone=args.alone,
        types=args.types,
        tokens=args.tokens,
        passes=args.passes,
        prepare=args.prepare,
        data=args.data,
    )


def chosen(names: Sequence[str]) -> list[str]:
    """The names, or all of them.  Exits for an unknown one."""
    unknown = [n for n in names if n not in BENCHMARKS]
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]}: known are {', '.join(BENCHMARKS)}")
    return list(names) or list(BENCHMARKS)


def measure(names: Sequence[str], options: Options) -> list[Result]:
    """Run benchmarks one after the other, keep each result as it comes, and print the table."""
    if not llamacpp.available():
        print("llama-cpp-python is not installed: no comparison", file=sys.stderr)
    about, results, kept = machine(), list[Result](), None
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        for result in BENCHMARKS[name].run(options):
            results.append(result)
            if not options.quick:
                kept = keep([result], options, about=about)
    if results:
        print(table(results))
    if kept:
        print(f"kept in {kept}", file=sys.stderr)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point."""
    args = parser().parse_args(argv)
    if args.list:
        for name, entry in BENCHMARKS.items():
            print(f"{name:14}  {entry.what}")
        return 0
    names = chosen(args.names)
    if args.prepare and names != ["cache-decode"]:
        sys.exit("--prepare is of cache-decode alone")
    measure(names, options_of(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
