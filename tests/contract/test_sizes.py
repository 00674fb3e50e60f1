"""Files stay short enough to read in one sitting, and functions to fit a screen or two."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(p for d in ("pykv", "tests", "docs", "benchmarks") for p in (ROOT / d).rglob("*.py"))
FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 400, 60, 120
DATA_TABLES: set[str] = set()  # files that hold a table and no logic may be longer


def long_functions(source, limit):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > limit:
                yield node.name, lines


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_are_short(path):
    name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    if name not in DATA_TABLES:
        n_lines = len(source.splitlines())
        assert n_lines <= FILE_LINES
    limit = KERNEL_LINES if name.startswith("pykv/kernels/") else FUNCTION_LINES
    assert list(long_functions(source, limit)) == []


def test_a_long_function_is_found():
    body = "\n".join(["def f():", *["    x = 1"] * 60])
    assert list(long_functions(body, 60)) == [("f", 61)]
