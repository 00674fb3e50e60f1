"""`pykv perplexity`: how well a model predicts a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykv.cli.options import ModelOption, Output, read_bytes
from pykv.cli.render import Screen
from pykv.config import CacheConfig, LoadConfig
from pykv.errors import ConfigError

if TYPE_CHECKING:
    from pykv.engine.model import Perplexity

EXAMPLE = """\
pykv perplexity wiki.test.txt --chunks 16
pykv perplexity -f wiki.test.txt -m model.gguf -c 2048 -ctk f32 -ctv f32 --json"""

_CTX_SIZE = 512  # tokens a chunk, llama-perplexity's default


def command(
    model_option: ModelOption,
    load: LoadConfig,
    cache: CacheConfig,
    output: Output,
    corpus: Annotated[
        str | None, typer.Argument(metavar="CORPUS", help="A text file; - is standard input.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="The same as CORPUS.")
    ] = None,
    chunks: Annotated[
        int, typer.Option("--chunks", metavar="N", help="Chunks to read; -1: all.")
    ] = -1,
) -> None:
    """Measure a model's perplexity on a text, as llama-perplexity does.

    The text is cut into chunks of -c tokens (default 512), and the second half of each is scored.
    """
    with Screen(output) as screen:
        if corpus is not None and file is not None and corpus != file:
            raise ConfigError(f"two texts were named, {corpus} and {file}: give one")
        name = corpus if corpus is not None else file
        if name is None:
            raise ConfigError("no text: name a file, or - for standard input")
        if chunks < 1 and chunks != -1:
            raise ConfigError(f"chunks must be 1 or more, or -1 for all, not {chunks}")
        text = read_bytes(name)
        ctx_size = load.ctx_size or _CTX_SIZE
        with screen.loaded(
            model_option.pick(),
            offline=model_option.offline,
            load=replace(load, ctx_size=ctx_size),
            cache=cache,
        ) as opened:
            with screen.running("perplexity") as tell:
                result = opened.perplexity(
                    text,
                    ctx_size=ctx_size,
                    chunks=None if chunks == -1 else chunks,
                    progress=lambda done, total, estimate, seconds: tell(
                        done, total, f"PPL {estimate:.4f}, {seconds:.2f} s a chunk"
                    ),
                )
            _report(screen, result, opened.path, ctx_size)


def _report(screen: Screen, result: Perplexity, model: Path, ctx_size: int) -> None:
    if screen.output.json:
        screen.json(
            {
                "model": str(model),
                "perplexity": result.value,
                "error": result.error,
                "ctx_size": ctx_size,
                "chunks": result.n_chunks,
                "tokens": result.n_tokens,
                "chunk_values": [float(v) for v in result.chunk_values],
            }
        )
    else:
        screen.line(f"Final estimate: PPL = {result.value:.4f} +/- {result.error:.5f}")
