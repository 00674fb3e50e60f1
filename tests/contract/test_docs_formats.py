"""docs/formats.md says what the formats are now; `python docs/generate_formats.py` writes it."""

import importlib.util
from pathlib import Path

import gguf

DOCS = Path(__file__).parents[2] / "docs"


def table():
    spec = importlib.util.spec_from_file_location("formats_page", DOCS / "generate_formats.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_formats_md_is_up_to_date():
    written = (DOCS / "formats.md").read_text(encoding="utf-8")
    assert table().page() == written, "run python docs/generate_formats.py"


def test_the_table_gives_the_sizes_that_the_gguf_package_knows():
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (DOCS / "formats.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| [`")
    ]
    assert len(rows) >= 16
    for name, roles, block_len, block_bytes, *_ in rows:
        if "weight" in roles:
            kind = gguf.GGMLQuantizationType[name[2 : name.index("`]")].upper()]
            assert (int(block_len), int(block_bytes)) == gguf.GGML_QUANT_SIZES[kind]


def test_every_format_names_its_source():
    text = (DOCS / "formats.md").read_text(encoding="utf-8").partition("## Sources")[2]
    lines = [line for line in text.splitlines() if line.startswith("- `")]
    assert lines
    assert all(len(line.partition(": ")[2]) > 20 for line in lines)
