"""`pykv tokenize`: what a model makes of a text."""

from __future__ import annotations

from typing import Annotated

import typer

from pykv.cli.options import ModelOption, Output, piped, read_bytes
from pykv.cli.render import Screen
from pykv.errors import ConfigError

EXAMPLE = """\
pykv tokenize "Hello world"
pykv tokenize -f prompt.txt -m model.gguf --ids
echo "<|im_start|>user" | pykv tokenize --parse-special --no-bos --json"""


def command(
    model_option: ModelOption,
    output: Output,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text; without it, standard input.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The same as TEXT.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="Read the text from a file.")
    ] = None,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Add no token at the beginning or the end.")
    ] = False,
    parse_special: Annotated[
        bool,
        typer.Option("--parse-special", help="Read control tokens that the text spells as such."),
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Only the ids, as a list.")] = False,
) -> None:
    """Show the tokens of a text.

    One line per token: its id, and the text that it stands for.
    """
    with Screen(output) as screen:
        data = _bytes(text, prompt, file)
        from pykv.engine.hub import resolve
        from pykv.engine.model import load_tokenizer

        with screen.progress() as progress:
            path = resolve(model_option.pick(), offline=model_option.offline, progress=progress)
        tokenizer = load_tokenizer(path)
        tokens = tokenizer.encode(data, add_special=not no_bos, parse_special=parse_special)
        pieces = [tokenizer.piece(i, special=True) for i in tokens]
        if output.json:
            screen.json(
                {
                    "model": str(path),
                    "tokens": [
                        {"id": i, "text": p.decode("utf-8", "replace"), "bytes": p.hex()}
                        for i, p in zip(tokens, pieces, strict=True)
                    ],
                }
            )
        elif ids:
            screen.line(str(tokens))
        else:
            for i, piece in zip(tokens, pieces, strict=True):
                screen.line(f"{i:>6}  {piece.decode('utf-8', 'backslashreplace')!r}")


def _bytes(text: str | None, prompt: str | None, file: str | None) -> bytes:
    """The text that was given, as the bytes that it came in."""
    given = [t for t in (text, prompt, file) if t is not None]
    if len(given) > 1:
        raise ConfigError("several texts were given: use one of TEXT, -p and -f")
    if file is not None:
        return read_bytes(file)
    if given:
        return given[0].encode("utf-8", "surrogateescape")
    data = piped()
    if data is None:
        raise ConfigError("no text: give one as TEXT, with -f or on standard input")
    return data
