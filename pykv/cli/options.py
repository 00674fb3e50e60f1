"""Every flag, declared once: a field of a frozen dataclass, its spellings and its help.

A command takes whole groups (`cache: CacheConfig, load: LoadConfig`), never single flags of one;
`expand` turns its signature into the one that Typer reads, and builds the groups from the values.
Names and short forms are llama.cpp's where it has them.
Source: llama.cpp common/arg.cpp.
"""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pykv.config import CacheConfig, LoadConfig, SamplingConfig
from pykv.errors import ConfigError


@dataclass(frozen=True)
class ModelOption:
    """Which model: by flag; a command's own MODEL argument goes through `pick`."""

    model_path: str | None = None
    hub: str | None = None
    offline: bool = False

    def pick(self, positional: str | None = None) -> str | None:
        """The one model that was named, or None for the default one.

        Raises ConfigError: two different ones were named.
        """
        hub = None if self.hub is None else f"hf:{self.hub}"
        named = [m for m in (positional, self.model_path, hub) if m is not None]
        for other in named[1:]:
            if other != named[0]:
                raise ConfigError(f"two models were named, {named[0]} and {other}: give one")
        return named[0] if named else None


@dataclass(frozen=True)
class Output:
    """What is printed besides the text itself."""

    json: bool = False
    verbose: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.verbose and self.quiet:
            raise ConfigError("-v and -q contradict each other: give one")


@dataclass(frozen=True)
class Request:
    """What the model is asked, and when its answer ends."""

    prompt: str | None = None
    file: str | None = None
    system: str | None = None
    predict: int = -1
    reverse_prompt: tuple[str, ...] = ()
    escape: bool = True

    def __post_init__(self) -> None:
        if self.prompt is not None and self.file is not None:
            raise ConfigError("both -p and -f give a prompt: use one")
        if self.predict < -2:
            raise ConfigError(f"predict must be 0 or more tokens, or -1, not {self.predict}")

    @property
    def max_tokens(self) -> int | None:
        """How many tokens at most; None: until the model ends or the context is full."""
        return self.predict if self.predict >= 0 else None

    def text(self) -> tuple[str, int] | None:
        """The prompt of -p or -f, and how many bytes of it were no UTF-8; None without either."""
        if self.prompt is not None:
            return decoded(self._argument(self.prompt))
        return None if self.file is None else decoded(read_bytes(self.file))

    def system_text(self) -> str | None:
        """The text of -sys."""
        return None if self.system is None else decoded(self._argument(self.system))[0]

    def stops(self) -> tuple[str, ...]:
        """The strings of -r."""
        return tuple(decoded(self._argument(s))[0] for s in self.reverse_prompt if s)

    def _argument(self, argument: str) -> bytes:
        # the shell's bytes: Python smuggles those that are no UTF-8 in as surrogates
        data = argument.encode("utf-8", "surrogateescape")
        return unescape(data) if self.escape else data


@dataclass(frozen=True)
class Flag:
    """How a field is spelled on the command line, and described."""

    names: tuple[str, ...]
    metavar: str
    help: str
    envvar: str | None = None


def _f(names: str, metavar: str, text: str, envvar: str | None = None) -> Flag:
    return Flag(tuple(names.split()), metavar, text, envvar)


# class -> title in the help, and a flag per field
GROUPS: dict[type[Any], tuple[str, dict[str, Flag]]] = {
    ModelOption: (
        "Model",
        {
            "model_path": _f(
                "-m --model", "MODEL", "A GGUF file or the name of a model.", "PYKV_MODEL"
            ),
            "hub": _f("-hf --hf-repo", "USER/REPO[:QUANT]", "A model on the Hugging Face hub."),
            "offline": _f(
                "--offline/--no-offline", "", "Use only what is already here; off by default."
            ),
        },
    ),
    Request: (
        "Request",
        {
            "prompt": _f("-p --prompt", "TEXT", "The prompt."),
            "file": _f("-f --file", "FILE", "Read the prompt from a file; - is standard input."),
            "system": _f("-sys --system-prompt", "TEXT", "The system message of a conversation."),
            "predict": _f(
                "-n --predict --n-predict", "N", "Tokens to generate; -1: until the model ends."
            ),
            "reverse_prompt": _f(
                "-r --reverse-prompt", "TEXT", "End when the answer holds this; may be repeated."
            ),
            "escape": _f(
                "-e/ --escape/--no-escape",
                "",
                r"Turn \n, \t, \\ and \xHH in -p, -sys and -r into what they mean: on by default.",
            ),
        },
    ),
    LoadConfig: (
        "Running",
        {
            "device": _f("--device", "NAME", "auto, cpu, cuda, or reference (plain NumPy, slow)."),
            "gpu_layers": _f(
                "-ngl --gpu-layers --n-gpu-layers",
                "N",
                "all or more than the model has: the whole model on the GPU; 0: none of it.",
            ),
            "threads": _f("-t --threads", "N", "CPU threads.  Default: the physical cores."),
            "ctx_size": _f(
                "-c --ctx-size",
                "N",
                "Tokens of context, or of a chunk; 0: the model's own, or the command's.",
            ),
            "batch": _f(
                "-b --batch-size", "N", "Tokens handed over per call; -ub is at most that."
            ),
            "ubatch": _f("-ub --ubatch-size", "N", "Tokens that go through the layers together."),
            "deterministic": _f(
                "--deterministic/--no-deterministic",
                "",
                "The same numbers for every batch split and cache state; slower, off by default.",
            ),
            "check_memory": _f(
                "--check-memory/--no-check-memory",
                "",
                "Refuse to load what does not fit the free memory: on by default.",
            ),
            "chat_template": _f(
                "--chat-template", "NAME|FILE", "A template in place of the model's own."
            ),
        },
    ),
    CacheConfig: (
        "KV cache",
        {
            "type_k": _f(
                "-ctk --cache-type-k",
                "TYPE",
                "How keys are kept; `pykv inspect` lists types, nuq ones take :outliers=P%.",
            ),
            "type_v": _f("-ctv --cache-type-v", "TYPE", "How values are kept, likewise."),
            "sinks": _f("--kv-sinks", "N", "First tokens that stay exact, 0 to 64."),
            "residual": _f(
                "--kv-residual", "N", "Newest tokens that stay exact.  Default: the types' own."
            ),
            "tail_type": _f(
                "--kv-tail-type", "TYPE", "Type of the exact tokens.  Default: f16, or wider."
            ),
            "transform_k": _f(
                "--kv-transform-k",
                "NAME",
                "none, hadamard, random, lowrank:R; auto: what suits the type.",
            ),
            "transform_v": _f("--kv-transform-v", "NAME", "The same for values."),
            "position": _f(
                "--kv-position",
                "WHEN",
                "When RoPE turns keys: as they are write, or read; those of nuq always read.",
            ),
            "override": _f(
                "--cache-type-override",
                "LAYERS=TYPES",
                "Other types for some layers, k: or v: or both; the last to name a layer counts: "
                "0-1=k:q8_0,v:q8_0;5=k:f16.",
            ),
            "guard": _f(
                "--kv-guard",
                "on|off",
                "Keep q8_0 keys in layers whose keys carry a large bias or outlier channels.",
            ),
            "policy": _f(
                "--kv-policy",
                "NAME",
                "Which tokens are kept: full, window, sinks, h2o, scissorhands, snapkv, fastgen; "
                "settings as h2o:recent=0.5.",
            ),
            "budget": _f(
                "--kv-budget",
                "N|P%",
                "Tokens that a policy keeps of each KV head, or their share of those seen.",
            ),
        },
    ),
    SamplingConfig: (
        "Sampling (defaults: the model file's, else those given)",
        {
            "temperature": _f("--temp --temperature", "X", "Temperature (0.8); 0: greedy."),
            "top_k": _f("--top-k", "N", "Only the N likeliest tokens (40); 0: all."),
            "top_p": _f("--top-p", "P", "Only the likeliest that sum to P (0.95); 1: off."),
            "min_p": _f("--min-p", "P", "Only those with P times the maximum (0.05); 0: off."),
            "typical_p": _f("--typical --typical-p", "P", "Locally typical sampling (1: off)."),
            "repeat_last_n": _f(
                "--repeat-last-n", "N", "Tokens that penalties look back on (64); -1: all."
            ),
            "repeat_penalty": _f("--repeat-penalty", "X", "Penalty for repeated tokens (1: off)."),
            "presence_penalty": _f("--presence-penalty", "X", "Penalty for having occurred (0)."),
            "frequency_penalty": _f("--frequency-penalty", "X", "Penalty per occurrence (0)."),
            "seed": _f("-s --seed", "N", "Seed of the draws; -1: a fresh one, which is reported."),
            "ignore_eos": _f(
                "--ignore-eos/--no-ignore-eos",
                "",
                "Go on when the model would end; off by default.",
            ),
        },
    ),
    Output: (
        "Output",
        {
            "json": _f("--json", "", "Print one JSON object on standard output."),
            "verbose": _f("-v --verbose", "", "Say more, on standard error."),
            "quiet": _f("-q --quiet", "", "Say nothing but errors, on standard error."),
        },
    ),
}

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A GGUF file or the name of a model, as -m."),
]


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every group parameter spread out into its flags, for Typer to read."""
    own = inspect.signature(command, eval_str=True).parameters
    spread: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for name, parameter in own.items():
        if parameter.annotation in GROUPS:
            groups[name] = parameter.annotation
            spread += _flags(parameter.annotation)
        else:
            spread.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def run(**values: Any) -> None:
        ctx: typer.Context = values.pop("ctx")
        built = {name: _build(group, values) for name, group in groups.items()}
        for name, group in groups.items():
            # a MODEL argument outranks PYKV_MODEL, and is no contradiction to it
            source = ctx.get_parameter_source("model_path") if group is ModelOption else None
            if source is not None and source.name == "ENVIRONMENT" and _names_model(values, built):
                built[name] = ModelOption(hub=built[name].hub, offline=built[name].offline)
        command(**values, **built)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature([context, *spread])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [context, *spread]}
    return run


def _names_model(values: dict[str, Any], built: dict[str, Any]) -> bool:
    return values.get("model") is not None or any(
        isinstance(group, ModelOption) and group.hub is not None for group in built.values()
    )


def _flags(group: type[Any]) -> list[inspect.Parameter]:
    title, flags = GROUPS[group]
    hints = get_type_hints(group)
    out = []
    for field in fields(group):
        flag = flags[field.name]
        kind = list[str] if hints[field.name] == tuple[str, ...] else hints[field.name]
        if field.default is MISSING:
            raise TypeError(f"{group.__name__}.{field.name} has no default")
        option = typer.Option(
            *flag.names,
            metavar=flag.metavar or None,
            help=flag.help,
            envvar=flag.envvar,
            show_envvar=flag.envvar is not None,
            show_default=not isinstance(field.default, bool),
            rich_help_panel=title,
        )
        default = None if field.default == () else field.default
        out.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, option],
            )
        )
    return out


def _build(group: type[Any], values: dict[str, Any]) -> Any:
    given = {field.name: values.pop(field.name) for field in fields(group)}
    for field in fields(group):
        if field.default == ():
            given[field.name] = tuple(given[field.name] or ())
    return group(**given)


def spelled(config: Any) -> str:
    """The flags of a group that say what differs from its defaults; empty where nothing does."""
    flags = GROUPS[type(config)][1]
    words: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            words += [flags[field.name].names[0], str(value)]
    return shlex.join(words)


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def unescape(data: bytes) -> bytes:
    r"""The bytes with \n, \r, \t, \', \", \\ and \xHH resolved; other backslashes stay.

    Source: llama.cpp common/common.cpp, string_process_escapes.
    """

    def one(match: re.Match[bytes]) -> bytes:
        found = match[1]
        return bytes.fromhex(found[1:].decode()) if found[:1] == b"x" else _ESCAPES[found]

    return re.sub(rb"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])", one, data)


def decoded(data: bytes) -> tuple[str, int]:
    """Text, and how many characters of it stand for bytes that were no UTF-8."""
    text = data.decode("utf-8", "replace")
    return text, text.count("\ufffd") - data.count("\ufffd".encode())


def read_bytes(file: str) -> bytes:
    """A file's bytes, or standard input's for `-`, less one newline at the end."""
    if file == "-":
        data = b"" if sys.stdin is None else sys.stdin.buffer.read()
    else:
        data = Path(file).read_bytes()
    return data.removesuffix(b"\n")


def piped() -> bytes | None:
    """What was piped in, less one newline at the end; None where a person sits at the keyboard."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return read_bytes("-")
