"""The only writer to the terminal: text on standard output, everything else on standard error."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from pykv.cli.options import Output

if TYPE_CHECKING:
    from pathlib import Path

    from pykv.config import CacheConfig, LoadConfig, SamplingConfig
    from pykv.engine.model import Generation, Model
    from pykv.engine.stats import Stats

Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)

# control characters steer a terminal: shown as pictures, but for newline and tab
_PICTURES = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | {c: 0xFFFD for c in range(0x80, 0xA0)}


def harmless(text: str) -> str:
    """The text with its control characters made visible, newlines and tabs apart."""
    return text.replace("\r\n", "\n").translate(_PICTURES)


def _write(stream: TextIO | None, text: str) -> None:
    """Writes and flushes; on a terminal without control characters, else every byte as it is."""
    if stream is None:  # closed by whoever started the program
        return
    if stream.isatty():
        text = harmless(text)
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def _coloured(stream: TextIO, cells: Sequence[str], colours: Sequence[str]) -> None:
    """A table's row on a terminal; an empty colour is the terminal's own."""
    line = importlib.import_module("rich.text").Text("|")
    for cell, colour in zip(cells, colours, strict=True):
        line.append(f" {harmless(cell)} ", style=colour).append("|")
    console = importlib.import_module("rich.console").Console(file=stream)
    console.print(line, soft_wrap=True)


def error(message: str) -> None:
    """`error: ...`, in one line, on standard error."""
    _write(sys.stderr, f"error: {harmless(' '.join(message.split()))}\n")


def abandon_stdout() -> None:
    """Whoever read standard output is gone: what Python still holds back goes nowhere."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """One line on standard error."""
        name = record.levelname.lower()
        _write(sys.stderr, f"{name}: {harmless(self.format(record))}\n")


class Screen:
    """Where a command writes, and how much; a context manager that shows pykv's log meanwhile."""

    def __init__(self, output: Output) -> None:
        self.output = output
        level = logging.ERROR if output.quiet else logging.WARNING
        self._handler = _Handler(logging.INFO if output.verbose else level)

    def __enter__(self) -> Screen:
        logger = logging.getLogger("pykv")
        self._old_level, self._old_propagate = logger.level, logger.propagate
        logger.addHandler(self._handler)
        logger.setLevel(self._handler.level)
        logger.propagate = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logger = logging.getLogger("pykv")
        logger.removeHandler(self._handler)
        logger.setLevel(self._old_level)
        logger.propagate = self._old_propagate

    def text(self, piece: str) -> None:
        """A piece of text for standard output."""
        _write(sys.stdout, piece)

    def line(self, text: str = "") -> None:
        """A line for standard output."""
        _write(sys.stdout, text + "\n")

    def json(self, value: object) -> None:
        """One JSON object, on standard output."""
        self.line(json.dumps(value, ensure_ascii=False, indent=2))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Columns for standard output: text to the left, numbers to the right."""
        cells = [list(head)] + [
            [f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        right = [
            bool(rows) and all(isinstance(row[i], int | float) for row in rows)
            for i in range(len(head))
        ]
        for row in cells:
            padded = [
                c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
            ]
            self.line("  ".join(padded).rstrip())

    def markdown(self, columns: Sequence[tuple[str, int, bool]]) -> Callable[..., None]:
        """The head of a Markdown table for standard output; returns what adds a row.

        Columns are (title, least width, to the right?); a row's cells are text, with a colour each
        if they are to have one on a terminal.
        """
        widths = [max(len(title), width) for title, width, _ in columns]
        right = [to_the_right for _, _, to_the_right in columns]

        def row(cells: list[str], colours: Sequence[str] | None = None) -> None:
            padded = [
                c.rjust(w) if r else c.ljust(w)
                for c, w, r in zip(cells, widths, right, strict=True)
            ]
            if colours is None or sys.stdout is None or not sys.stdout.isatty():
                self.line(f"| {' | '.join(padded)} |")
            else:
                _coloured(sys.stdout, padded, colours)

        row([title for title, _, _ in columns])
        row(["-" * (w - r) + ":" * r for w, r in zip(widths, right, strict=True)])
        return row

    def csv(self, cells: Sequence[object]) -> None:
        """A row of comma-separated values, on standard output."""
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow(cells)
        self.line(out.getvalue())

    def note(self, text: str) -> None:
        """A line for the person at the keyboard, unless quiet."""
        if not self.output.quiet:
            _write(sys.stderr, text + "\n")

    def say(self, text: str) -> None:
        """A line in reply to the person at the keyboard, on standard error, whatever -q says."""
        _write(sys.stderr, text + "\n")

    def trouble(self, message: str) -> None:
        """An error that ends an answer, but not the program."""
        error(message)

    def detail(self, text: str) -> None:
        """A line that only -v shows."""
        if self.output.verbose:
            _write(sys.stderr, text + "\n")

    def warn_bad_bytes(self, n_bad: int) -> None:
        """Says that some input was not UTF-8."""
        if n_bad:
            self.note(f"warning: the input is not all UTF-8; {n_bad:,} faults became U+FFFD")

    def ask(self, prompt: str) -> str:
        """One line from the keyboard, with editing and history where there is readline.

        Raises EOFError at the end of the input, KeyboardInterrupt on Ctrl-C.
        """
        if sys.stdin is None:
            raise EOFError  # it was closed before we began
        if importlib.util.find_spec("readline") is not None:
            # importing it is what turns it on; a paste of several lines then is one input
            readline: Any = importlib.import_module("readline")
            readline.parse_and_bind("set enable-bracketed-paste on")
        if sys.stdout.isatty():
            return input(prompt)
        _write(sys.stderr, prompt)  # the answers go to a file: keep the prompt out of it
        return input()

    def answer(self, generation: Generation, model: Path) -> None:
        """A whole generation: its text as it comes, or one JSON object at its end."""
        for piece in generation:
            if not self.output.json:
                self.text(piece)
        stats = generation.stats
        if self.output.json:
            self.json(
                {
                    "model": str(model),
                    "text": generation.text,
                    "tokens": [int(i) for i in generation.tokens],
                    "stats": stats.to_dict(),
                }
            )
        elif not generation.text.endswith("\n"):
            self.line()
        if stats.finish == "context":
            self.note("the context is full: the text was cut here; -c gives it more room")
        self.summary(stats)

    def summary(self, stats: Stats) -> None:
        """What a run took, in one line, or with -v in full."""
        self.note(
            f"{stats.prompt_tokens:,} prompt tokens ({stats.cached_tokens:,} cached), "
            f"{stats.prompt_tps:,.1f} tokens/s; {stats.generated_tokens:,} generated, "
            f"{stats.generated_tps:,.1f} tokens/s; seed {stats.seed}"
        )
        if self.output.verbose:
            self.stats(stats, plan=False)

    def stats(self, stats: Stats, *, plan: bool = True) -> None:
        """Every figure of a run, on standard error, whatever -q says."""
        mib = 2**20
        lines = [
            f"prompt: {stats.prompt_tokens:,} tokens, {stats.cached_tokens:,} of them cached, "
            f"{stats.prompt_seconds:.3f} s, {stats.prompt_tps:,.1f} tokens/s",
            f"answer: {stats.generated_tokens:,} tokens, {stats.generated_seconds:.3f} s, "
            f"{stats.generated_tps:,.1f} tokens/s, ended by {stats.finish}",
            f"cache: {stats.cache_bytes / mib:.2f} MiB in use, "
            f"{stats.cache_reserved_bytes / mib:.2f} MiB reserved, "
            f"{stats.cache_f16_bytes / mib:.2f} MiB as f16",
            f"weights: {stats.weight_bytes / mib:.1f} MiB",
            f"load: {stats.load_seconds:.2f} s, compiling: {stats.compile_seconds:.2f} s",
            f"threads: {stats.threads}, seed: {stats.seed}",
            *(stats.plan if plan else ()),
        ]
        _write(sys.stderr, "".join(line + "\n" for line in lines))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A callable (stage, done, total): a bar on a terminal, else one line per stage."""
        bars, told = _Bars(), set[str]()

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in told:
                told.add(stage)
                self.note(stage)

        try:
            yield tell if self._plain else bars.move
        finally:
            bars.close()

    @contextmanager
    def loaded(
        self,
        wanted: str | None,
        *,
        offline: bool,
        load: LoadConfig,
        cache: CacheConfig,
        sampling: SamplingConfig | None = None,
    ) -> Iterator[Model]:
        """The model, open for a `with` block; its loading and its kernels are told."""
        from pykv.engine.model import load as load_model

        with self.progress() as progress:
            model = load_model(
                wanted,
                cache=cache,
                load=load,
                sampling=sampling,
                offline=offline,
                progress=progress,
            )
        with model:
            for line in model.plan:
                self.detail(line)
            yield model

    @contextmanager
    def running(self, stage: str) -> Iterator[Callable[[int, int, str], None]]:
        """A callable (done, total, figures) for a long count; plain lines where no terminal is."""
        bars = _Bars()

        def tell(done: int, total: int, figures: str) -> None:
            if self._plain:
                self.note(f"[{done}/{total}] {figures}")
            else:
                bars.move(stage, done, total, f"{done}/{total} {figures}")

        try:
            yield tell
        finally:
            bars.close()

    @property
    def _plain(self) -> bool:
        return self.output.quiet or sys.stderr is None or not sys.stderr.isatty()


class _Bars:
    """A progress bar per stage on standard error; drawn, and rich imported, once one moves."""

    def __init__(self) -> None:
        self._tasks: dict[str, Any] = {}
        self._bar: Any = None

    def move(self, stage: str, done: int, total: int, figures: str = "") -> None:
        if self._bar is None:
            console = importlib.import_module("rich.console").Console(stderr=True)
            rich: Any = importlib.import_module("rich.progress")
            self._bar = rich.Progress(
                rich.TextColumn("{task.description}", markup=False),
                rich.BarColumn(),
                rich.TaskProgressColumn(),
                rich.TimeRemainingColumn(),
                rich.TextColumn("{task.fields[figures]}", markup=False),
                console=console,
                transient=True,
            )
            self._bar.start()
        label = harmless(stage)
        if label not in self._tasks:
            # without a total the bar pulses, and promises no time
            self._tasks[label] = self._bar.add_task(label, total=total or None, figures=figures)
        self._bar.update(self._tasks[label], completed=done, total=total or None, figures=figures)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def plain(value: Mapping[str, object] | Sequence[object] | object, limit: int = 100) -> str:
    """A value in one line of at most `limit` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
