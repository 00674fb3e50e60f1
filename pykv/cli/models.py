"""`pykv models`: which models there are, and which are here."""

from __future__ import annotations

from typing import Annotated

import typer

from pykv.cli.options import Output
from pykv.cli.render import Screen

EXAMPLE = """\
pykv models
pykv models --verify --json"""


def command(
    output: Output,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the files here and compare their checksums.")
    ] = False,
) -> None:
    """List the models that pykv knows by name, and the files in its folder.

    Any other GGUF file is used by its path, or from the Hugging Face hub with -hf.
    """
    with Screen(output) as screen:
        from pykv.engine.hub import CATALOG, DEFAULT_MODEL, installed

        here = {found.path.name: found for found in installed(verify=verify)}
        rows = []
        for entry in CATALOG:
            found = here.pop(entry.file, None)
            rows.append(
                {
                    "name": entry.name,
                    "bytes": entry.size_bytes,
                    "default": entry.name == DEFAULT_MODEL,
                    "path": None if found is None else str(found.path),
                    "checksum": None if found is None else found.checksum,
                    "licence": entry.licence,
                    "summary": entry.summary,
                }
            )
        for found in here.values():
            rows.append(
                {
                    "name": found.name,
                    "bytes": found.nbytes,
                    "default": False,
                    "path": str(found.path),
                    "checksum": found.checksum,
                    "licence": None,
                    "summary": None,
                }
            )
        if output.json:
            screen.json({"models": rows})
            return
        screen.table(
            ["name", "bytes", "here", "licence", "summary"],
            [
                [r["name"], r["bytes"], _here(r, verify), r["licence"] or "", r["summary"] or ""]
                for r in rows
            ],
        )


def _here(row: dict[str, object], verify: bool) -> str:
    if row["path"] is None:
        return "no"
    return f"yes, checksum {row['checksum']}" if verify else "yes"
