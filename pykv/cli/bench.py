"""`pykv bench`: how fast a model reads and writes, with which cache and after how many tokens.

Source: llama.cpp tools/llama-bench/llama-bench.cpp (flags, columns, fields).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product, zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli.options import ModelArgument, ModelOption, Output
from pykv.cli.render import Screen
from pykv.config import CacheConfig, LoadConfig
from pykv.errors import ConfigError

if TYPE_CHECKING:
    from pykv.engine.bench import Case, Subject
    from pykv.engine.model import Model

EXAMPLE = """\
pykv bench
pykv bench model.gguf -n 64 -d 0,4096 -ctk f16,q8_0 -ctv f16,q8_0
pykv bench -m model.gguf -p 0 -n 128 -r 3 -o csv"""

FORMATS = ("md", "json", "csv")
_LISTS = ("samples_ns", "samples_ts")  # in JSON only, as llama-bench has it
_LENGTH = re.compile(r"\s*[0-9]{1,9}\s*")
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def command(
    model_option: ModelOption,
    load: LoadConfig,
    cache: CacheConfig,
    output: Output,
    model: ModelArgument = None,
    n_prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="N,...", help="Prompts' lengths; 0: none.")
    ] = "512",
    n_gen: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="N,...", help="Tokens to decode; 0: none.")
    ] = "128",
    n_depth: Annotated[
        str, typer.Option("-d", "--n-depth", metavar="N,...", help="Tokens in the cache before.")
    ] = "0",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", help="Samples of each test.")
    ] = 5,
    form: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FORMAT", help="md (the default), json or csv."),
    ] = None,
) -> None:
    """Measure a model's speed, as llama-bench does, and what its cache costs.

    Prompts (pp) and decoding (tg) are timed at each depth, with each pair of the cache types that
    -ctk and -ctv list.  Cache: bytes in use at the end.  Read/step: bytes of weights and cache that
    a decoded token reads.  Roofline: the time to read those at the bandwidth measured first, as a
    share of the time that the token took.
    """
    with Screen(output) as screen:
        chosen = _format(form, output)
        if repetitions < 1:
            raise ConfigError(f"repetitions must be 1 or more, not {repetitions}")
        lengths = [_numbers("-p", n_prompt), _numbers("-n", n_gen), _numbers("-d", n_depth)]
        pairs = _names("-ctk", cache.type_k), _names("-ctv", cache.type_v)

        from pykv.engine import bench
        from pykv.engine.hub import resolve

        wanted = bench.cases(*lengths)
        with screen.progress() as progress:
            path = resolve(
                model_option.pick(model), offline=model_option.offline, progress=progress
            )
        file = bench.subject(path)
        caches = [replace(cache, type_k=k, type_v=v) for k, v in product(*pairs)]
        fitted = replace(load, ctx_size=bench.check(wanted, caches, file, load.ctx_size))

        def opened(each: CacheConfig) -> AbstractContextManager[Model]:
            return screen.loaded(str(path), offline=model_option.offline, load=fitted, cache=each)

        if len(caches) > 1:
            # each type once, so that one that cannot run is refused before anything is measured
            for k, v in zip_longest(*pairs):
                with opened(replace(cache, type_k=k or pairs[0][0], type_v=v or pairs[1][0])):
                    pass
        _measure(_Report(screen, chosen, wanted, caches, file), opened, repetitions)


def _format(form: str | None, output: Output) -> str:
    chosen = form if form is not None else "json" if output.json else "md"
    if chosen not in FORMATS:
        raise ConfigError(f"unknown output format '{form}': it is one of {', '.join(FORMATS)}")
    if output.json and chosen != "json":
        raise ConfigError(f"--json and -o {chosen} contradict each other: give one")
    return chosen


def _numbers(flag: str, text: str) -> list[int]:
    """Whole numbers of 0 or more, each once, in the order given."""
    parts = text.split(",")
    if not all(_LENGTH.fullmatch(part) for part in parts):
        raise ConfigError(
            f"{flag} must be whole numbers of 0 or more with commas between them, not '{text}'"
        )
    return list(dict.fromkeys(int(part) for part in parts))


def _names(flag: str, text: str) -> list[str]:
    """Cache types, each once, in the order given; whether there are such shows later."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{flag} must be cache types with commas between them, not '{text}'")
    return list(dict.fromkeys(parts))


class _Report:
    """Rows in one of the output formats: as soon as each is ready, but for JSON."""

    def __init__(
        self,
        screen: Screen,
        form: str,
        wanted: Sequence[Case],
        caches: Sequence[CacheConfig],
        file: Subject,
    ) -> None:
        self.screen, self.form, self.wanted, self.caches, self.file = (
            screen, form, wanted, caches, file,
        )  # fmt: skip
        self.name = file.path.name.removesuffix(".gguf")
        self.records: list[dict[str, Any]] = []
        self._row: Callable[[list[str]], None] | None = None

    def begin(self, bandwidth: float, threads: int) -> None:
        """What stands above the rows."""
        if self.form != "md":
            return
        plural = "" if threads == 1 else "s"
        self.screen.line(f"read bandwidth: {bandwidth / 1e9:.1f} GB/s on {threads} thread{plural}")
        self.screen.line()
        self._row = self.screen.markdown(
            [
                ("model", len(self.name), False),
                ("size", 10, True),
                ("threads", 0, True),
                ("type_k", max(len(c.type_k) for c in self.caches), False),
                ("type_v", max(len(c.type_v) for c in self.caches), False),
                ("test", max(len(c.name) for c in self.wanted), False),
                ("t/s", 16, True),
                ("cache", 10, True),
                ("read/step", 10, True),
                ("roofline", 0, True),
            ]
        )

    def add(self, case: Case, record: dict[str, Any]) -> None:
        """A row."""
        self.records.append(record)
        if self._row is not None:
            step, share = record["step_bytes"], record["roofline"]
            self._row(
                [
                    self.name,
                    _size(record["model_size"]),
                    str(record["n_threads"]),
                    record["type_k"],
                    record["type_v"],
                    case.name,
                    f"{record['avg_ts']:.2f} ± {record['stddev_ts']:.2f}",
                    _size(record["cache_bytes"]),
                    "-" if step is None else _size(step),
                    "-" if share is None else f"{share:.0%}",
                ]
            )
        elif self.form == "csv":
            names = [name for name in record if name not in _LISTS]
            if len(self.records) == 1:
                self.screen.csv(names)
            self.screen.csv([record[name] for name in names])

    def end(self) -> None:
        """What was held back."""
        if self.form == "json":
            self.screen.json(self.records)


def _size(n_bytes: int) -> str:
    unit, name = (_GIB, "GiB") if n_bytes >= _GIB else (_MIB, "MiB")
    if n_bytes < _MIB:
        unit, name = _KIB, "KiB"
    return f"{n_bytes / unit:.2f} {name}"


def _measure(
    report: _Report, opened: Callable[[CacheConfig], AbstractContextManager[Model]], n: int
) -> None:
    """Every case with every cache, n samples of each; an interrupt leaves what is ready."""
    from pykv.engine import bench

    bandwidth = None
    try:
        for cache in report.caches:
            with opened(cache) as model:
                if bandwidth is None:
                    threads = bench.threads_of(model)
                    bandwidth = bench.read_bandwidth(threads)
                    report.begin(bandwidth, threads)
                for found in bench.measure(model, report.wanted, n, report.file.step_bytes):
                    report.add(found.case, bench.record(model, report.file, found, bandwidth))
    finally:
        if bandwidth is not None:
            report.end()
