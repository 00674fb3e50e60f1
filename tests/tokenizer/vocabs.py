"""Vocabularies for the tests: files from disk, each read once, and small ones made up here."""

from functools import cache
from pathlib import Path

import pytest

from pykv.gguf.reader import open_gguf
from pykv.tokenizer import Tokenizer, from_metadata
from pykv.tokenizer.bpe import ALPHABET

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "vocabs"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@cache
def metadata(path: Path) -> dict[str, object]:
    with open_gguf(path) as file:
        return dict(file.metadata)


@cache
def tokenizer(path: Path) -> Tokenizer:
    return from_metadata(metadata(path), where=path.name)


def vocab_file(name: str) -> Path:
    path = FOLDER / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path} is absent: the conformance vocabularies are not part of pykv")
    return path


def small_bpe(*specials: tuple[str, int], **keys: object) -> dict[str, object]:
    """The byte alphabet (ids 0 to 255), three merges, then the given (text, type) tokens."""
    merged = ["he", "ll", "hell"]
    tokens = [*ALPHABET, *merged, *(text for text, _ in specials)]
    types = [NORMAL] * (256 + len(merged)) + [kind for _, kind in specials]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [t.encode() for t in tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [b"h e", b"l l", b"he ll"],
        **{f"tokenizer.ggml.{k}": v for k, v in keys.items()},
    }


def small_spm(*specials: tuple[str, int], **keys: object) -> dict[str, object]:
    """<unk>, <s>, </s>, the 256 bytes (ids 3 to 258), some pieces, then the given tokens."""
    normal = ["▁", "a", "b", "ab", "▁a", "▁ab", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *normal]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(normal)
    scores = [0.0] * 259 + [-float(i) for i in range(len(normal))] + [0.0] * len(specials)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [t.encode() for t in (*tokens, *(t for t, _ in specials))],
        "tokenizer.ggml.token_type": [*types, *(kind for _, kind in specials)],
        "tokenizer.ggml.scores": scores,
        **{f"tokenizer.ggml.{k}": v for k, v in keys.items()},
    }
