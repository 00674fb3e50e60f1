import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_oracles import bpe, pieces
from vocabs import CONTROL, metadata, small_bpe, tokenizer, vocab_file

from pykv.errors import TokenizerError
from pykv.tokenizer import from_metadata
from pykv.tokenizer.bpe import ALPHABET, byte_alphabet
from pykv.tokenizer.pretok import PRE_TOKENIZERS

LETTERS = {b: c for c, b in ALPHABET.items()}
texts = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8", max_codepoint=0x2FFF), max_size=10),
        st.sampled_from(
            ["hello", " world", "'ll", "  ", "\n", "日本語", "123", "हिन्दी", "<|im_end|>"]
        ),
    ),
    max_size=8,
).map("".join)


def reference(path, text: str) -> list[int]:
    data = metadata(path)
    if path not in _CACHE:
        ids = {t.decode(): i for i, t in enumerate(data["tokenizer.ggml.tokens"])}
        merges = [tuple(m.decode().split(" ", 1)) for m in data["tokenizer.ggml.merges"]]
        _CACHE[path] = ids, {m: i for i, m in enumerate(merges)}
    ids, ranks = _CACHE[path]
    patterns = PRE_TOKENIZERS[data["tokenizer.ggml.pre"]].patterns
    out = []
    for piece in pieces(text, patterns):
        out += bpe("".join([LETTERS[b] for b in piece.encode()]), ids, ranks)
    return out


_CACHE = {}


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_gpt2_merges_as_llama_cpp(text):
    path = vocab_file("gpt-2")
    assert tokenizer(path).encode(text, add_special=False) == reference(path, text)


@pytest.mark.models
def test_smollm2_merges_as_llama_cpp(smollm2_path):
    # this vocabulary lacks the bytes that UTF-8 never uses and a few others
    tokens = [t.decode() for t in metadata(smollm2_path)["tokenizer.ggml.tokens"]]
    lacking = {b for b, c in LETTERS.items() if c not in set(tokens)}

    @settings(max_examples=200, deadline=None)
    @given(text=texts.filter(lambda t: not lacking & set(t.encode())))
    def check(text):
        ids = tokenizer(smollm2_path).encode(text, add_special=False)
        assert ids == reference(smollm2_path, text)
        assert tokenizer(smollm2_path).decode(ids) == text

    check()


def test_the_alphabet_is_gpt2s():
    assert len(byte_alphabet()) == len(set(byte_alphabet().values())) == 256
    assert (LETTERS[0x20], LETTERS[0x0A], LETTERS[0x21], LETTERS[0xAD]) == ("Ġ", "Ċ", "!", "Ń")


def test_a_byte_without_a_token_is_dropped_and_parts_its_neighbours():
    data = small_bpe()
    at = list(ALPHABET).index("!")
    data["tokenizer.ggml.tokens"][at] = b"unused"
    data["tokenizer.ggml.pre"] = "gpt-2"
    small = from_metadata(data, where="small")
    ids = small.encode("$!%", add_special=False)
    assert [small.token_text(i) for i in ids] == ["$", "%"]
    # h and e would merge if they met
    data["tokenizer.ggml.pre"] = "superbpe"
    small = from_metadata(data, where="small")
    ids = small.encode("h!e", add_special=False)
    assert [small.token_text(i) for i in ids] == ["h", "e"]


def test_a_merge_without_a_token_falls_to_its_characters():
    data = small_bpe()
    data["tokenizer.ggml.merges"] += [b"x y"]
    small = from_metadata(data, where="small")
    assert [small.token_text(i) for i in small.encode("xy", add_special=False)] == ["x", "y"]


def test_a_merge_never_gives_a_control_token():
    data = small_bpe(("xy", CONTROL))
    data["tokenizer.ggml.merges"] += [b"x y"]
    data["tokenizer.ggml.pre"] = "llama-bpe"  # takes whole words that are tokens
    small = from_metadata(data, where="small")
    ids = small.encode("xy", add_special=False)
    assert [small.token_text(i) for i in ids] == ["x", "y"]
    parsed = small.encode("xy", add_special=False, parse_special=True)
    assert [small.token_text(i) for i in parsed] == ["xy"]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["hello"]), ("gpt-2", ["hell", "o"])])
def test_ignore_merges_takes_whole_words(pre, expected):
    data = small_bpe(("hello", 1))
    data["tokenizer.ggml.pre"] = pre
    small = from_metadata(data, where="small")
    ids = small.encode("hello", add_special=False)
    assert [small.token_text(i) for i in ids] == expected


def test_repeated_merges_keep_the_first_rank():
    data = small_bpe()
    data["tokenizer.ggml.tokens"].append(b"el")
    data["tokenizer.ggml.token_type"].append(1)
    data["tokenizer.ggml.merges"] = [b"h e", b"e l", b"h e"]
    small = from_metadata(data, where="small")
    ids = small.encode("hel", add_special=False)
    assert [small.token_text(i) for i in ids] == ["he", "l"]


def test_each_bad_byte_is_a_replacement_character():
    path = vocab_file("gpt-2")
    good = tokenizer(path).encode("a\ufffd\ufffdb", add_special=False)
    assert tokenizer(path).encode(b"a\xe2\x82b", add_special=False) == good


def gemma4(**keys: object) -> dict[str, object]:
    normal = ["▁", "a", "b", "ab", "▁ab", "\n", "\n\n"]
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{b:02X}>" for b in range(256)), *normal]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [t.encode() for t in tokens],
        "tokenizer.ggml.token_type": [3, 3, 3] + [6] * 256 + [1] * len(normal),
        "tokenizer.ggml.merges": [b"a b", "▁ ab".encode()],
        "tokenizer.ggml.bos_token_id": 2,
        **keys,
    }


def test_gemma4_merges_utf8_and_takes_newline_runs_whole():
    small = from_metadata(gemma4(), where="small")
    ids = small.encode("ab ab\n\nbaé\n\n\n")
    texts = ["<bos>", "ab", "▁ab", "\n\n", "b", "a", "<0xC3>", "<0xA9>", "\n", "\n", "\n"]
    assert [small.token_text(i) for i in ids] == texts
    assert small.decode(ids) == "ab ab\n\nbaé\n\n\n"


@pytest.mark.parametrize(
    "merges", [None, [b"a \xff"], ["a b"]], ids=["none", "not UTF-8", "not bytes"]
)
def test_broken_merges_are_refused(merges):
    data = small_bpe()
    data["tokenizer.ggml.merges"] = merges
    with pytest.raises(TokenizerError, match="small: tokenizer.ggml.merges"):
        from_metadata(data, where="small")


@pytest.mark.parametrize(
    "text", ["word " * 200_000, "x" * 200_000, " " * 200_000 + "x", "\n" * 200_000, "9" * 200_000]
)
def test_long_texts_take_time_in_proportion(text):
    path = vocab_file("gpt-2")
    start = time.perf_counter()
    ids = tokenizer(path).encode(text, add_special=False)
    # quadratic would be hours; the bound leaves room for a busy machine
    assert time.perf_counter() - start < 20
    assert tokenizer(path).decode(ids) == text


def test_texts_longer_than_the_regex_engine_bears_are_cut_between_words():
    path = vocab_file("gpt-2")
    text = "word " * 900_000  # two cuts
    assert tokenizer(path).encode(text[:-1], add_special=False) == (
        tokenizer(path).encode("word", add_special=False)
        + tokenizer(path).encode(" word", add_special=False) * 899_999
    )
