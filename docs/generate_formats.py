"""Writes docs/formats.md from the formats themselves: `python docs/generate_formats.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from pykv import registry

HEAD = """\
# Formats

Made from `pykv/formats/` by `python docs/generate_formats.py`; a test compares the two. Each file
there is the specification of its format: layout, arithmetic, source.

*Weights* are read as they lie in a GGUF file. *Cache* formats are what `-ctk` and `-ctv` take.
*CPU* says that there are SIMD kernels; without them the reference backend still runs a cache format
and the CPU backend decodes a weight type to float32 when it loads a model, with a warning saying
what that costs. Blocks and their bits are those of weights in a file; bits of a cached value are
those of a full page of a head of width 64, scales and padding included.

"""
COLUMNS = ("format", "roles", "values in a block", "bytes", "bits a value", "cached", "CPU")
WIDTH = 64  # of the head that the cached bits are given for


def source_of(doc: str) -> str:
    """The `Source:` paragraph of a module's docstring, as one line."""
    text = doc.partition("Source:")[2].partition("\n\n")[0]
    return " ".join(text.split())


def cached_bits(format_: Any) -> str:
    """Bits of a cached value: one figure, or keys' and values' where they differ."""
    if "cache" not in format_.roles:
        return ""
    bits = [format_.bits_per_value(WIDTH, side) for side in ("key", "value")]
    return " / ".join(f"{b:.4g}" for b in dict.fromkeys(bits))


def row(name: str) -> list[str]:
    """A format's line of the table."""
    format_ = registry.find("formats", name, "format").FORMAT
    block = ["", "", ""]
    if "weight" in format_.roles:
        bits = format_.block_bytes * 8 / format_.block_len
        block = [str(format_.block_len), str(format_.block_bytes), f"{bits:.4g}"]
    kernels = importlib.util.find_spec(f"pykv.kernels.{name}_numba") is not None
    return [
        f"[`{name}`](../pykv/formats/{name}.py)",
        ", ".join(format_.roles),
        *block,
        cached_bits(format_),
        "yes" if kernels else "no",
    ]


def page() -> str:
    """The whole of docs/formats.md."""
    names = registry.names("formats")
    modules = {name: registry.find("formats", name, "format") for name in names}
    names.sort(key=lambda n: (modules[n].FORMAT.block_len > 1, n))
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row(name) for name in names)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    sources = "".join(f"- `{n}`: {source_of(modules[n].__doc__ or '')}\n" for n in names)
    return f"{HEAD}{table}\n## Sources\n\n{sources}"


if __name__ == "__main__":
    target = Path(__file__).with_name("formats.md")
    target.write_text(page(), encoding="utf-8", newline="\n")
    sys.stdout.write(f"{target}\n")
