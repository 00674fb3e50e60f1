"""Writes docs/cli.md from the commands' own help: `python docs/generate.py`."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from pykv.cli import app

HEAD = """\
# The command line

Made from `pykv COMMAND --help` by `python docs/generate.py`; a test compares the two.

Long options take `_` for `-`.  Text goes to standard output, everything else to standard error.
Exit codes: 0 done; 1 something could not be done (one line on standard error says what); 2 wrong
usage; 130 ended by Ctrl-C.
"""


def help_of(*args: str) -> str:
    """What a command prints for --help, 80 columns wide."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app.run([*args, "--help"], columns=80)
    return out.getvalue().strip()


def page() -> str:
    """The whole of docs/cli.md."""
    sections = [f"## pykv\n\n```text\n{help_of()}\n```\n"]
    sections += [f"## pykv {stem}\n\n```text\n{help_of(stem)}\n```\n" for stem in app.stems()]
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    target = Path(__file__).with_name("cli.md")
    target.write_text(page(), encoding="utf-8", newline="\n")
    sys.stdout.write(f"{target}\n")
