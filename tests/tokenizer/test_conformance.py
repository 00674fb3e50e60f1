"""llama.cpp's own test vectors, and the first tokens of wikitext that it makes."""

import json

import pytest
from vocabs import FOLDER, metadata, tokenizer, vocab_file

from pykv.tokenizer import from_metadata

SEPARATOR = b"\n__ggml_vocab_test__\n"
NAMES = ("deepseek-coder", "gpt-2", "llama-spm", "phi-3")


def vectors(path) -> list[tuple[bytes, list[int]]]:
    texts = path.with_name(path.name + ".inp").read_bytes().split(SEPARATOR)
    lines = path.with_name(path.name + ".out").read_bytes().decode().split("\n")
    if lines[-1] == "":
        lines.pop()
    if len(texts) == len(lines) + 1:
        texts.pop()
    return list(zip(texts, [[int(i) for i in x.split()] for x in lines], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_vectors(name):
    path = vocab_file(name)
    cases = vectors(path)
    assert len(cases) == 46
    for text, ids in cases:
        assert tokenizer(path).encode(text, add_special=False) == ids, text


@pytest.mark.parametrize("name", NAMES)
def test_vectors_decode_to_their_text(name):
    path = vocab_file(name)
    space = metadata(path)["tokenizer.ggml.model"] == "llama"
    for text, ids in vectors(path):
        expected = b" " + text if space and text else text
        assert tokenizer(path).decode_bytes(ids) == expected


@pytest.mark.models
@pytest.mark.parametrize(
    ("fixture", "key"),
    [
        ("smollm2_path", "smollm2-135m-instruct-q4_1"),
        ("gemma_path", "gemma-3-270m-q4_k_m"),
    ],
)
def test_first_tokens_of_wikitext(request, fixture, key):
    reference = FOLDER.parent / "reference.json"
    if not reference.exists():
        pytest.skip(f"{reference} is absent: the reference values are not part of pykv")
    path = request.getfixturevalue(fixture)
    expected = json.loads(reference.read_text())["first tokens (no BOS)"][key]
    text = (FOLDER.parent / "wikitext2.test.txt").read_bytes()[:4000]
    ids = from_metadata(metadata(path), where=path.name).encode(text, add_special=False)
    assert ids[: len(expected)] == expected
