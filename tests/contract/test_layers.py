"""Who may import whom, and which third party lives where: the tables of ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "pykv").rglob("*.py"))

L0 = {"errors", "config", "registry"}
# a folder -> what it may import besides itself, L0 and the standard library
ALLOWED = {
    "": {"engine"},  # pykv/__init__.py, on first use of a name
    "formats": set(),
    "gguf": set(),
    "tokenizer": set(),
    "policies": set(),
    "kernels": {"formats"},
    "backends": {"kernels", "formats"},
    "cache": {"backends", "formats", "policies"},
    "models": {"backends"},
    "engine": {"models", "cache", "policies", "backends", "formats", "gguf", "tokenizer"},
    "cli": {"engine"},
    "__main__": {"cli"},
    "errors": set(),
    "config": {"errors"},
    "registry": {"errors"},
}
# a third party -> its homes
HOMES = {
    "numpy": (
        "formats/*", "gguf/*", "policies/*", "kernels/*", "backends/*", "cache/*", "models/*",
        "engine/*",
    ),
    "numba": ("kernels/*_numba.py", "kernels/simd*.py"),
    "llvmlite": ("kernels/*_numba.py", "kernels/simd*.py"),
    "triton": ("kernels/*_triton.py",),
    "torch": ("backends/cuda*.py",),
    "gguf": ("backends/plan.py",),
    "threadpoolctl": ("backends/threads.py",),
    "tokenizers": ("tokenizer/*",),
    "sentencepiece": ("tokenizer/*",),
    "jinja2": ("tokenizer/*",),
    "huggingface_hub": ("engine/hub.py",),
    "platformdirs": ("engine/hub.py", "kernels/jit_numba.py"),
    "typer": ("cli/*",),
    "rich": ("cli/*",),
    "matplotlib": ("cli/*",),
}  # fmt: skip
OWN = re.compile(r"pykv\.(\w+)(?:\.|$)")
IMPORTERS = {"import_module", "find_spec", "__import__"}


def docstrings(tree):
    """The nodes that are docstrings, which import nothing."""
    homes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(n.body[0].value)
        for n in ast.walk(tree)
        if isinstance(n, homes) and n.body and isinstance(n.body[0], ast.Expr)
    }


def imports_of(source, where=""):
    """Dotted names that a source imports, lazily or by a name in a string too."""
    tree = ast.parse(source)
    skip = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                if called in IMPORTERS:
                    yield first.value
                elif called in {"find", "names"} and "registry" in ast.unparse(node.func):
                    yield f"pykv.{first.value}"
        # "pykv.kernels." in an f-string is the name of a module to be imported
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skip
            and OWN.match(node.value)
        ):
            yield node.value


def place(path):
    """A file's folder, or its stem where it lies at the top; "" for pykv/__init__.py."""
    inside = path.relative_to(ROOT / "pykv")
    if len(inside.parts) > 1:
        return inside.parts[0]
    return "" if inside.stem == "__init__" else inside.stem


def at_home(inside, third_party):
    return any(fnmatch(inside, home) for home in HOMES.get(third_party, ()))


def problems(path, source):
    inside, own = path.relative_to(ROOT / "pykv").as_posix(), place(path)
    for name in imports_of(source, inside):
        top = name.split(".")[0]
        if top == "pykv":
            match = OWN.match(name)
            target = match[1] if match else None
            if target is None or target == own or target.startswith("__"):
                continue
            if target in L0 and own not in L0:
                continue
            if target in ALLOWED and target not in ALLOWED[own]:
                yield f"pykv/{inside} imports pykv.{target}"
        elif top not in sys.stdlib_module_names and not at_home(inside, top):
            yield f"pykv/{inside} imports {top}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_file_imports_only_what_its_layer_may(path):
    assert place(path) in ALLOWED, "a new folder: give it a row in ALLOWED and ARCHITECTURE.md"
    assert list(problems(path, path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("place_", "source"),
    [
        ("models/x.py", "from pykv.cache.store import Store"),
        ("cache/x.py", "def f():\n    from pykv.models.base import Graph"),
        ("formats/x.py", "import pykv.gguf.types"),
        ("tokenizer/x.py", "from pykv import gguf"),
        ("cli/x.py", "import importlib\nimportlib.import_module('pykv.backends.cpu')"),
        ("cli/x.py", "name = 1\nm = f'pykv.kernels.{name}_numba'"),
        ("models/x.py", "from pykv import registry\nregistry.find('formats', 'q4_0', 'type')"),
        ("errors.py", "from pykv import config"),
        ("engine/x.py", "import torch"),
        ("cli/x.py", "import numpy"),
        ("kernels/x_triton.py", "import numba"),
        ("kernels/x_numba.py", "def f():\n    import triton.language as tl"),
        ("tokenizer/x.py", "__import__('typer')"),
    ],
)
def test_a_forbidden_import_is_found(place_, source):
    assert len(set(problems(ROOT / "pykv" / place_, source))) == 1


def test_architecture_md_states_the_same_table():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)/` \| ([^|]*) \|", text, re.MULTILINE))
    written = {folder: set(re.findall(r"`(\w+)`", cell)) for folder, cell in rows.items()}
    folders = {p.parent.name for p in FILES if p.parent != ROOT / "pykv"}
    assert written == {folder: ALLOWED[folder] & folders for folder in folders}
