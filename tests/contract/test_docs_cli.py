"""docs/cli.md is what --help prints now; `python docs/generate.py` writes it again."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_cli_md_is_up_to_date(monkeypatch):
    monkeypatch.delenv("PYKV_MODEL", raising=False)
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    written = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert generate.page() == written, "run python docs/generate.py"
    assert written.count("\nExample:\n") == len(generate.app.stems())
