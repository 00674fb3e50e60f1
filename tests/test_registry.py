"""The file's name is the key."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types

import pytest

from pykv import registry
from pykv.errors import UnsupportedError


def test_keys_are_the_files_without_the_machinery():
    found = registry.names("formats")
    assert {"f16", "q4_0", "q6_k", "mxfp4"} <= set(found)
    assert found == sorted(set(found))
    assert "base" not in found


def test_find_gives_the_module_of_that_name():
    assert registry.find("formats", "q4_0", "cache type").__name__ == "pykv.formats.q4_0"


@pytest.mark.parametrize("name", ["base", "blocks", "q4-0", "", "q4_0.x", "os.path", "../errors"])
def test_what_is_no_key_is_refused(name):
    with pytest.raises(UnsupportedError, match="unknown cache type"):
        registry.find("formats", name, "cache type")


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(UnsupportedError, match="unknown cache type 'mxfp': known are .*q8_0") as e:
        registry.find("formats", "mxfp", "cache type")
    assert str(e.value).endswith("; did you mean mxfp4?")
    with pytest.raises(UnsupportedError, match="known are .*q8_0.*tq4$"):
        registry.find("formats", "zzzzzzzz", "cache type")


class Entry:
    name = "nf4"

    def load(self):
        return types.ModuleType("their_package.nf4")


def test_a_plugin_adds_a_name(monkeypatch):
    def entry_points(*, group, name=None):
        return [Entry()] if group == "pykv.formats" and name in (None, "nf4") else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    for remembered in ("_plugins", "_names"):  # what earlier tests found must not answer
        monkeypatch.setattr(registry, remembered, getattr(registry, remembered).__wrapped__)
    assert "nf4" in registry.names("formats")
    assert registry.find("formats", "nf4", "cache type").__name__ == "their_package.nf4"
    assert registry.find("formats", "q4_0", "cache type").__name__ == "pykv.formats.q4_0"


def test_plugins_are_looked_up_where_packages_declare_them():
    assert registry.entry_points is importlib.metadata.entry_points


def test_an_import_error_inside_a_module_surfaces(tmp_path):
    """Only the absence of the very file means "unknown"."""
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    code = (
        "import pykv.formats, pykv.registry as r\n"
        f"pykv.formats.__path__.append({str(tmp_path)!r})\n"
        "try:\n    r.find('formats', 'broken', 'cache type')\n"
        "except ModuleNotFoundError as e:\n    print(e.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "a_package_that_is_not_there"


def test_finding_one_format_imports_no_other():
    code = (
        "import sys, pykv.registry as r\n"
        "r.find('formats', 'q4_0', 'cache type')\n"
        "print(*sorted(m for m in sys.modules if m.startswith('pykv.formats.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    machinery = {"pykv.formats.base", "pykv.formats.coded"}
    assert set(done.stdout.split()) - machinery == {"pykv.formats.q4_0"}
