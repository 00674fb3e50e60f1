"""The documents: links resolve, commands exist, the example runs, and nothing private is named."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer

from pykv.cli import app

ROOT = Path(__file__).parents[2]
SKIP = {".venv", ".git", "build", "dist", "node_modules", ".pytest_cache"}
PAGES = sorted(p for p in ROOT.rglob("*.md") if not SKIP & set(p.relative_to(ROOT).parts))
SCRIPTS = [ROOT / "run-tests", ROOT / ".ci" / "run"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
UsageError = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "UsageError")


def prose(text):
    """A page without its code blocks."""
    return BLOCK.sub("", text)


def anchors(text):
    """The names that a page's headings can be linked by, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def commands(text):
    """The `pykv` command lines of a page's shell blocks and of its inline code, as words."""
    lines = [
        line.removeprefix("$ ")
        for kind, body in BLOCK.findall(text)
        if kind in ("sh", "console", "bash")
        for line in body.splitlines()
    ]
    for line in lines + re.findall(r"`(pykv [^`]+)`", prose(text)):
        for part in re.split(r"&&|\||;|>", line):
            words = shlex.split(part, comments=True)
            if words and Path(words[0]).name == "pykv" and words[1:2] != ["COMMAND"]:
                yield words[1:]


def test_the_readme_and_its_like_are_there():
    names = {p.relative_to(ROOT).as_posix() for p in PAGES}
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_resolve(page):
    for target in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / unquote(name) if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_outside_the_project_is_named(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"\.\./shared|/work/|\bshared/|/root/|/home/", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_command_lines_are_understood(page, monkeypatch):
    monkeypatch.delenv("PYKV_MODEL", raising=False)
    group = app.group()
    for words in commands(page.read_text(encoding="utf-8")):
        stem = words[0] if words else ""
        if not stem or stem.startswith("-"):
            assert app.run([*words, "--help"]) == 0
            continue
        ctx = group.make_context("pykv", [stem])
        command = group.get_command(ctx, stem)
        assert command is not None, words
        # parsed and checked, and not run
        command.make_context(stem, list(words[1:]), parent=ctx)


def test_the_readme_has_commands_to_understand():
    found = {words[0] for words in commands((ROOT / "README.md").read_text()) if words}
    assert set(app.stems()) <= found


def test_a_command_line_with_an_unknown_flag_is_noticed():
    words = next(commands("```sh\npykv chat --no-such-flag\n```\n"))
    group = app.group()
    ctx = group.make_context("pykv", ["chat"])
    with pytest.raises(UsageError, match="no-such-flag"):
        group.get_command(ctx, "chat").make_context("chat", words[1:], parent=ctx)


@pytest.mark.models
def test_the_example_in_python_prints_what_the_readme_says(smollm2_path, monkeypatch):
    monkeypatch.delenv("PYKV_MODEL", raising=False)
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    kinds = [kind for kind, _ in blocks]
    at = kinds.index("python")
    assert kinds[at + 1] == "text"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(blocks[at][1], "README.md", "exec"), {"__name__": "readme"})
    assert out.getvalue() == blocks[at + 1][1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_sound_bash_and_can_be_run(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    assert script.stat().st_mode & 0o100
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


def test_continuous_integration_runs_the_second_command():
    second = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[1][1].strip()
    assert second == "./run-tests"
    assert second in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
