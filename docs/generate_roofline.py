"""Writes docs/gpu-roofline.md from the store's byte counts: `python docs/generate_roofline.py`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from pykv import registry
from pykv.backends.base import PAGE, LayerShape
from pykv.cache.layout import Band, bands_of
from pykv.config import CacheConfig

SHAPE, LAYERS = LayerShape(32, 8, 128, 128), 32  # Llama-3-8B
EMBED, FFN, VOCAB = 4096, 14336, 128256
TYPES = ("f16", "q8_0", "q4_0", "kivi2")
CONTEXTS = (8192, 32768, 131072)  # cached tokens, the newest included
CARDS = (("H200", 4.8e12), ("24 GB card", 1.0e12))  # bytes a second
MEMORY = 24 * 10**9  # bytes of the smaller card
ENTRY = 8  # bytes of a table entry, which stands for a page
CHUNK = 8  # table entries that share a partial sum, as in attention_triton.py

HEAD = """\
# Floors of a decode step on a GPU

Made from the store's page sizes by `python docs/generate_roofline.py`; a test compares the two.
**These are floors by arithmetic, and no GPU was measured**: bytes that one step must move, over the
memory's bandwidth ({cards}). MB and GB are powers of ten.

The model is Llama-3-8B: {layers} layers, {heads} query heads and {n_kv} KV heads of {d}; one
sequence of S tokens, the new one included. K and V have the same type; sinks ({sinks} tokens) and
residual ({residuals}) are the defaults. Sinks and the last tokens
are exact f16, the others lie in pages of {page} tokens, one for each layer, KV head and side.
A step moves

```text
pages     every page once: sinks, encoded pages and tail, partly filled ones whole
tables    layers * KV heads * 2 sides * entries * {entry} B,
          entries = 1 + ceil((S - sinks) / {page})
new       layers * KV heads * 2 sides * {d} * 2 B for the new token's cells, and where pages are
          encoded, each {page}th step's tail pages read and codes written, over {page}
partials  2 * layers * query heads * chunks * ({d} + 2) * 4 B, chunks = ceil(entries / {chunk}):
          f32 sums and two numbers more of each chunk, written by the attention and read by the
          kernel that combines them
floor     (pages + tables + new + partials) / bandwidth
```

A layer's partials may stay in the GPU's cache between the two kernels; then a step is faster by
their share. Queries, outputs and activations (some kB a layer) are left out.
"""
ATTENTION = ("S", "cache", "pages", "tables", "new", "partials", "sum", "µs, H200", "µs, 24 GB")
STEP = ("S", "cache", "cache held", "with weights", "left of 24 GB", "µs, H200", "µs, 24 GB")
WEIGHTS = """\
## With the weights

A Q4_K_M file keeps half of the layers' attn_v and ffn_down and the output matrix in q6_k, norms in
f32 and all else in q4_k (llama.cpp src/llama-quant.cpp). By the block sizes of these types its
tensors take {held:,} B ({held_gb:.2f} GB; a file, with its vocabulary, is about 4.92 GB). A step
reads all but the embedding matrix, of which it takes one row: {read:,} B, which are
{floors}.
The last two columns are floors of a whole step, weights and cache. All of these fit in 24 GB; what
is left is what the driver, PyTorch and the kernels' buffers may take.
"""


@dataclass(frozen=True)
class Moved:
    """Bytes that the attention of all layers moves in one step."""

    pages: int
    tables: int
    new: int
    partials: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.pages + self.tables + self.new + self.partials


def entries_of(tokens: int, sinks: int) -> int:
    """Table entries of a sequence: the sinks', and one for each page of the rest."""
    return 1 + -(-(tokens - sinks) // PAGE)


def page_bytes(band: Band, tokens: int, sinks: int) -> int:
    """Bytes of the pages that a sequence holds in one layer."""
    rest = tokens - sinks
    encoded = 0 if band.exact else max(rest - band.residual, 0) // PAGE
    counts = {"sinks": 1, "page": encoded, "tail": entries_of(tokens, sinks) - 1 - encoded}
    return sum(counts[kind] * n_bytes * SHAPE.n_kv for (kind, _), n_bytes in band.sizes.items())


def moved(type_: str, tokens: int) -> Moved:
    """What a step moves after which `tokens` are cached."""
    config = CacheConfig(type_, type_)
    (band,) = bands_of(config, [SHAPE] * LAYERS)
    entries, heads = entries_of(tokens, config.sinks), LAYERS * SHAPE.n_kv
    cells = (SHAPE.d_k + SHAPE.d_v) * 2
    encoding = 0 if band.exact else sum(
        band.sizes[kind, side] for kind in ("tail", "page") for side in (0, 1)
    )  # fmt: skip
    chunks = -(-entries // CHUNK)
    partial = LAYERS * SHAPE.n_head * chunks * (SHAPE.d_v + 2) * 4
    return Moved(
        LAYERS * page_bytes(band, tokens, config.sinks),
        heads * 2 * entries * ENTRY,
        heads * (cells + encoding // PAGE),
        2 * partial,
    )


def residuals() -> str:
    """Each type's count of newest tokens that stay exact."""
    bands = {type_: bands_of(CacheConfig(type_, type_), [SHAPE])[0] for type_ in TYPES}
    return ", ".join(f"{t} {'all' if b.exact else b.residual}" for t, b in bands.items())


def weights() -> tuple[int, int]:
    """Bytes of a Q4_K_M file's tensors, and of those that a step reads."""

    def nbytes(type_: str, n: int) -> int:
        format_ = registry.find("formats", type_, "weight type").FORMAT
        size: int = n // format_.block_len * format_.block_bytes
        return size

    kv, half = SHAPE.n_kv * SHAPE.d_k, LAYERS // 2
    better = half * (EMBED * kv + EMBED * FFN)
    embedding = nbytes("q4_k", VOCAB * EMBED)
    plain = LAYERS * (2 * EMBED * EMBED + EMBED * kv + 2 * EMBED * FFN) + better
    norms = nbytes("f32", (2 * LAYERS + 1) * EMBED)
    read = nbytes("q4_k", plain) + nbytes("q6_k", better + VOCAB * EMBED) + norms
    return read + embedding, read + embedding // VOCAB


def micros(n_bytes: int) -> list[str]:
    """The floors of that many bytes on each card, in µs."""
    return [f"{n_bytes / bandwidth * 1e6:,.0f}" for _, bandwidth in CARDS]


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table of numbers, in Markdown."""
    lines = [columns, ["---", "---", *["---:"] * (len(columns) - 2)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """The whole of docs/gpu-roofline.md."""
    held, read = weights()
    attention, step = [], []
    for tokens in CONTEXTS:
        for type_ in TYPES:
            m = moved(type_, tokens)
            start = [f"{tokens:,}", type_]
            parts = (m.pages, m.tables, m.new, m.partials, m.total)
            attention.append([*start, *(f"{n / 1e6:,.2f}" for n in parts), *micros(m.total)])
            cache = m.pages + m.tables
            sizes = (cache, cache + held, MEMORY - cache - held)
            step.append([*start, *(f"{n / 1e9:.2f} GB" for n in sizes), *micros(m.total + read)])
    head = HEAD.format(
        cards="; ".join(f"{name}: {bandwidth / 1e12:.1f} TB/s" for name, bandwidth in CARDS),
        layers=LAYERS, heads=SHAPE.n_head, n_kv=SHAPE.n_kv, d=SHAPE.d_k, page=PAGE, entry=ENTRY,
        chunk=CHUNK, sinks=CacheConfig().sinks, residuals=residuals(),
    )  # fmt: skip
    floors = " and ".join(
        f"{us} µs on the {name}" for us, (name, _) in zip(micros(read), CARDS, strict=True)
    )
    text = WEIGHTS.format(held=held, held_gb=held / 1e9, read=read, floors=floors)
    return "\n".join(
        [head, "## Attention", "", "MB a step, and the floor of all layers' attention.", "",
         table(ATTENTION, attention), text, table(STEP, step)]
    )  # fmt: skip


if __name__ == "__main__":
    target = Path(__file__).with_name("gpu-roofline.md")
    target.write_text(page(), encoding="utf-8", newline="\n")
    sys.stdout.write(f"{target}\n")
