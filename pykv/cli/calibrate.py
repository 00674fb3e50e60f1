"""`pykv calibrate`: measures on a text what some cache types need to know about a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykv.cli.options import ModelArgument, ModelOption, Output, read_bytes
from pykv.cli.render import Screen
from pykv.config import CacheConfig, LoadConfig
from pykv.errors import ConfigError

if TYPE_CHECKING:
    from pykv.engine.calibration import Calibration

EXAMPLE = """\
pykv calibrate -f book.txt
pykv calibrate model.gguf -f book.txt --types nuq4,nuq3:outliers=1%
pykv calibrate model.gguf -f - --types fp8_e4m3 --chunks 4 -c 1024 --json"""

_CTX_SIZE, _CHUNKS = 2048, 16


def command(
    model_option: ModelOption,
    load: LoadConfig,
    cache: CacheConfig,
    output: Output,
    model: ModelArgument = None,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", metavar="FILE", help="The text; - is standard input."),
    ] = None,
    types: Annotated[
        str,
        typer.Option(
            "--types",
            metavar="TYPE,...",
            help="nuq4, nuq3, nuq2, each also with :outliers=P%, fp8_e4m3, fp8_e5m2, lowrank; all.",
        ),
    ] = "all",
    chunks: Annotated[
        int, typer.Option("--chunks", metavar="N", help="Chunks to read; -1: all.")
    ] = _CHUNKS,
) -> None:
    """Measure on a text what nuq types, scaled fp8 and low-rank transforms need of a model.

    The text is cut into chunks of -c tokens (default 2048).  A file for each type goes into pykv's
    cache folder, where later runs with this model find it.  A text like those that the model will
    read serves best.
    """
    with Screen(output) as screen:
        if file is None:
            raise ConfigError("no text: give a file with -f, or - for standard input")
        if chunks < 1 and chunks != -1:
            raise ConfigError(f"chunks must be 1 or more, or -1 for all, not {chunks}")

        from pykv.engine import calibrate, calibration

        wanted, text = calibrate.choose(types), read_bytes(file)
        ctx_size = load.ctx_size or _CTX_SIZE
        # a chunk at once: then a layer's keys need not wait for those of the next batch
        # only the CPU backend can be listened to
        device = "cpu" if load.device == "auto" else load.device
        whole = replace(load, device=device, ctx_size=ctx_size, batch=ctx_size, ubatch=ctx_size)
        with screen.loaded(
            model_option.pick(model), offline=model_option.offline, load=whole, cache=cache
        ) as opened:
            _announce(screen, calibration.places(opened, wanted))
            with screen.running("calibrating") as tell:
                made = calibrate.calibrate(
                    opened,
                    text,
                    wanted,
                    ctx_size,
                    None if chunks == -1 else chunks,
                    lambda done, total, seconds: tell(done, total, f"{seconds:.2f} s a chunk"),
                )
            _report(screen, opened.path, calibration.write_all(opened, made))


def _announce(screen: Screen, places: list[Path]) -> None:
    for path in places:
        if path.exists():
            screen.note(f"{path} will be replaced")


def _report(screen: Screen, model: Path, made: list[tuple[Calibration, Path]]) -> None:
    if screen.output.json:
        files = [{"type": c.type, "tokens": c.tokens, "path": str(path)} for c, path in made]
        screen.json({"model": str(model), "files": files})
    else:
        screen.table(["type", "file"], [[c.type, str(path)] for c, path in made])
