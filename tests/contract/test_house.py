"""Rules of the house that a reader would otherwise have to watch: CONTRIBUTING.md lists them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "pykv").rglob("*.py"))
LATER = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
# choices that a class must not multiply: no name may hold words of two of them
AXES = (
    re.compile(r"Quant|Encoded|Fp8|Q\d|Kivi"),
    re.compile(r"Window|Rotating|Sliding|Sink|Evict|Policy"),
    re.compile(r"Batch"),
    re.compile(r"Page|Block(?!Format)"),
)
GLOBAL_EFFECTS = {
    "atexit.register", "logging.basicConfig", "signal.signal", "faulthandler.enable",
    "numba.set_num_threads", "warnings.simplefilter", "warnings.filterwarnings",
}  # fmt: skip


def places(source, path):
    """Every breach of a rule in a source, as `line: what`."""
    tree, inside = ast.parse(source), path.relative_to(ROOT / "pykv").as_posix()
    for node in ast.walk(tree):
        for what in _breaches(node, inside):
            yield f"{node.lineno}: {what}"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and LATER.search(token.string):
            yield f"{token.start[0]}: work left for later"


def _breaches(node, inside):
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name == "print" and inside != "cli/render.py":
            yield "print"
        if name in GLOBAL_EFFECTS and not inside.startswith("cli/"):
            yield f"{name} touches the whole process"
    elif isinstance(node, ast.Attribute):
        name = ast.unparse(node)
        if name in {"os.environ", "os.getenv", "os.putenv"} and inside != "engine/hub.py":
            yield name
    elif isinstance(node, ast.ImportFrom) and node.module == "os":
        if {a.name for a in node.names} & {"environ", "getenv", "putenv"}:
            yield "environ imported by name"
    elif isinstance(node, ast.ExceptHandler):
        caught = "" if node.type is None else ast.unparse(node.type)
        if node.type is None or re.search(r"\bException\b", caught):
            yield f"except {caught}"
        told = inside == "engine/devices.py"  # as the reason why there is no GPU
        if ("ImportError" in caught or "ModuleNotFoundError" in caught) and not told:
            yield "a suppressed ImportError"
    elif isinstance(node, ast.Assert):
        yield "assert"
    elif isinstance(node, ast.ClassDef) and sum(bool(a.search(node.name)) for a in AXES) > 1:
        yield f"class {node.name} multiplies choices"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_rules_hold(path):
    assert list(places(path.read_text(encoding="utf-8"), path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "print(1)",
        "import os\nx = os.environ['A']",
        "from os import getenv",
        "try:\n    pass\nexcept Exception:\n    pass",
        "try:\n    pass\nexcept (ValueError, Exception):\n    pass",
        "try:\n    pass\nexcept:\n    pass",
        "try:\n    import x\nexcept ImportError:\n    pass",
        "assert True",
        "x = 1  # TO" + "DO: more",
        "class QuantizedBatchStore:\n    pass",
        "import signal\nsignal.signal(2, None)",
    ],
)
def test_a_breach_is_found(source):
    assert len(list(places(source, ROOT / "pykv" / "engine" / "x.py"))) == 1


def test_the_wheels_of_a_page_are_no_breach():
    source = "class PagePool:\n    pass\n\nclass BlockFormat:\n    pass\n"
    assert list(places(source, ROOT / "pykv" / "cache" / "x.py")) == []
