"""`pykv`: mounts every command by its file's name, and turns errors into one line.

A command is a module of this folder with a function `command`, whose docstring is its help, and a
string EXAMPLE; an underscore in its name is a hyphen in the command's.  Nothing of the engine is
imported until a command runs.
"""

from __future__ import annotations

import errno
import gc
import io
import pkgutil
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import pykv
from pykv.cli import options, render
from pykv.cli._start import SIGINT_EXIT
from pykv.config import CacheConfig
from pykv.errors import ConfigError, PykvError

_NOT_COMMANDS = {"app", "options", "render"}
_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
}
_SIGPIPE_EXIT = 141  # as a shell reports a program that the signal ended
# the root of Typer's usage errors; Typer gives it no name of its own, and its home has moved
_UsageError: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError")


def stems() -> list[str]:
    """The commands' names."""
    found = {m.name for m in pkgutil.iter_modules(import_module("pykv.cli").__path__)}
    return sorted(n.replace("_", "-") for n in found - _NOT_COMMANDS if not n.startswith("_"))


def _module(stem: str) -> ModuleType:
    return import_module(f"pykv.cli.{stem.replace('-', '_')}")


class _Value:
    """A value as the shell gave it, as text, truth or a number.

    Typer checks values with pydantic, whose import takes 0.15 s of every start and which pykv does
    not need: text stays, and numbers say what they want.
    """

    def __init__(self, annotation: Any) -> None:
        kinds = (k for k in (bool, int, float) if annotation in (k, k | None))
        self._kind: type[Any] = next(kinds, str)

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value in its type.  Raises BadParameter: it is no number."""
        if isinstance(value, list | tuple):
            return [self._one(v, param, ctx) for v in value]
        return None if value is None else self._one(value, param, ctx)

    def _one(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._kind(value)
        except ValueError:
            wanted = "a whole number" if self._kind is int else "a number"
            raise typer.BadParameter(f"'{value}' is not {wanted}", ctx, param) from None


def _light(params: list[Any]) -> list[Any]:
    """The same parameters, which convert their values without pydantic."""
    for param in params:
        # older versions of Typer convert without it, and know neither attribute
        described = getattr(param, "type_descriptor", None)
        if described is not None:
            param._runtime_param = _Value(described.annotation)
    return params


class _Command(TyperCommand):
    """A command whose help lists its options by group."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, the help option included."""
        return _light(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One section per group, in the order of the signature."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = "Arguments" if param.param_type_name == "argument" else "Options"
                title = getattr(param, "rich_help_panel", None) or title
                sections.setdefault(title, []).append(record)  # Options: a command's own, and -h
        for title, records in ((t, r) for t, r in sections.items() if r):
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The example, line for line."""
        if self.epilog:
            with formatter.section("Example"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class _Commands(TyperGroup):
    """The commands, each imported when it is asked for."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, the help option included."""
        return _light(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, sorted."""
        return stems()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None."""
        if cmd_name not in stems():
            return None
        module = _module(cmd_name)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(cmd_name, cls=_Command, epilog=module.EXAMPLE, context_settings=_SETTINGS)(
            options.expand(module.command)
        )
        return typer.main.get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Names and first sentences; no command is built for it."""
        rows = [(s, (_module(s).command.__doc__ or "").splitlines()[0]) for s in stems()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def cache_setting(line: str) -> CacheConfig:
    """The cache that a line of its flags describes, as in `-ctk q8_0 --kv-sinks 8`.

    Raises ConfigError: it holds anything else, or a value that is none.
    """
    found: list[CacheConfig] = []

    def take(cache: CacheConfig) -> None:
        found.append(cache)

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = _SETTINGS | {"help_option_names": []}
    app.command("setting", cls=_Command, context_settings=settings)(options.expand(take))
    command = typer.main.get_command(app)
    try:
        with command.make_context("setting", shlex.split(line)) as ctx:
            command.invoke(ctx)
    except ValueError as error:  # a quotation mark without its other
        raise ConfigError(f"setting '{line}': {error}") from error
    except _UsageError as error:
        what = error.format_message().rstrip(".")
        raise ConfigError(
            f"setting '{line}': {what}; it takes the flags of the KV cache"
        ) from error
    return found[0]


def group() -> Any:
    """The whole program as a Typer group."""
    app = typer.Typer(
        cls=_Commands, add_completion=False, rich_markup_mode=None, context_settings=_SETTINGS
    )

    @app.callback(invoke_without_command=True)
    def start(
        ctx: typer.Context,
        version: bool = typer.Option(False, "--version", help="Say which pykv this is."),
    ) -> None:
        """Run GGUF language models; `pykv COMMAND --help` explains a command."""
        if version:
            typer.echo(f"pykv {pykv.__version__}")
        elif ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())

    return typer.main.get_command(app)


def run(args: Sequence[str], columns: int | None = None) -> int:
    """Runs one command line; returns the exit code.  What went wrong is one line on stderr.

    `columns` is the width of help pages; None: the terminal's, but at most 80.
    """
    try:
        with group().make_context("pykv", list(args), terminal_width=columns) as ctx:
            ctx.command.invoke(ctx)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.Exit as end:
        return int(end.exit_code)
    except _UsageError as error:
        hint = error.ctx.command_path if error.ctx is not None else "pykv"
        render.error(f"{error.format_message().rstrip('.')}; see {hint} --help")
        return int(error.exit_code)
    except PykvError as error:
        render.error(str(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return SIGINT_EXIT
    except BrokenPipeError:
        render.abandon_stdout()
        return _SIGPIPE_EXIT
    except MemoryError:
        render.error(
            "the memory does not suffice: try a smaller context (-c) or cache type (-ctk, -ctv)"
        )
        return 1
    except OSError as error:
        where = "standard output" if error.filename is None else error.filename
        full = error.errno == errno.ENOSPC
        what = "the disk is full, make room on it" if full else error.strerror or str(error)
        render.error(f"{where}: {what}" if full or error.filename is not None else what)
        return 1
    return 0


def main() -> int:
    """The entry point of the `pykv` command."""
    # imports and vocabularies make objects that stay; looking through them for garbage again and
    # again is a tenth of a start, and this process is ours
    gc.set_threshold(100_000)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte at the keyboard ends nothing
    return run(sys.argv[1:])
