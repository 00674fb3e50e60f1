import logging

import pytest
from vocabs import CONTROL, NORMAL, USER_DEFINED, small_bpe

from pykv.errors import TokenizerError
from pykv.tokenizer import from_metadata
from pykv.tokenizer.vocab import EOG_TEXTS, read_vocab


def vocab(*specials, **keys):
    return read_vocab(small_bpe(*specials, **keys), "small", add_bos=False, add_eos=False)


def eog_texts(*texts: str) -> set[str]:
    # ids 0 and 1 are letters; eos is one of them and always ends
    built = vocab(*((t, NORMAL) for t in texts), eos_token_id=0, bos_token_id=1)
    return {built.tokens[i].decode() for i in built.eog - {0}}


@pytest.mark.parametrize("text", EOG_TEXTS)
def test_texts_that_end_a_generation(text):
    assert eog_texts(text, "<other>") == {text}
    assert vocab((text, NORMAL)).types[-1] == CONTROL


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["<|end|>", "<|return|>", "<|calls|>"], {"<|return|>", "<|calls|>"}),
        (["<|end|>", "<|calls|>", "<|flush|>"], {"<|calls|>", "<|flush|>"}),
        (["<|end|>", "<|return|>"], {"<|end|>", "<|return|>"}),
        (["</s>", "<|tool_response>"], {"<|tool_response>"}),
        (["<fim_pad>", "<reponame>", "<|file_sep|>"], {"<fim_pad>", "<reponame>", "<|file_sep|>"}),
        (["<fim_prefix>", "<SUF>", "<|fim_middle|>"], set()),
    ],
)
def test_end_of_generation_exceptions(texts, expected):
    assert eog_texts(*texts) == expected


def test_ids_named_by_metadata_end_a_generation():
    built = vocab(*((f"<t{i}>", CONTROL) for i in range(4)), eos_token_id=259, eot_token_id=260)
    assert built.eog == {259, 260}
    built = vocab(("<a>", 3), ("<b>", 3), ("<c>", 3), fim_pad_token_id=259, eom_token_id=260)
    assert built.eog == {11, 259, 260}  # 11 is the default eos of this kind


def test_ends_removed_become_printable():
    texts = ["<|end|>", "<|return|>", "<|call|>", "</s>", "<|tool_response>"]
    built = vocab(*((t, CONTROL) for t in texts))
    assert built.types[259] == USER_DEFINED
    assert built.types[262] == NORMAL


def test_default_ids_hold_where_the_file_names_none():
    assert vocab().special == {"bos": 11, "eos": 11}
    assert vocab(bos_token_id=3).special["bos"] == 3
    glm = read_vocab(small_bpe() | {"tokenizer.ggml.pre": "glm4"}, "s", add_bos=True, add_eos=False)
    assert "bos" not in glm.special
    assert not glm.add_bos


def test_ids_out_of_range_are_reported_and_the_default_kept(caplog):
    with caplog.at_level(logging.WARNING):
        built = vocab(bos_token_id=999, eos_token_id=-1)
    assert built.special == {"bos": 11, "eos": 11}
    assert "small: tokenizer.ggml.bos_token_id is 999, outside of the 259 tokens" in caplog.text


def test_empty_texts_are_named():
    data = small_bpe()
    data["tokenizer.ggml.tokens"][300 - 44] = b""
    built = read_vocab(data, "small", add_bos=False, add_eos=False)
    assert built.tokens[256] == b"[EMPTY_256]"
    assert built.ids[b"[EMPTY_256]"] == 256


def test_suppressed_ids_in_range():
    assert from_metadata(small_bpe(suppress_tokens=[5, -1, 999, 7]), where="s").suppress == (5, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "small: tokenizer.ggml.tokens must be"),
        ({"tokens": []}, "small: tokenizer.ggml.tokens must be"),
        ({"tokens": ["a"]}, "small: tokenizer.ggml.tokens must be"),
        ({"tokens": [b"a", b"b", b"a"]}, "small: the token text b'a' occurs twice"),
        ({"token_type": [1, 1]}, "small: tokenizer.ggml.token_type has 2 entries where 259"),
        ({"scores": [0.5]}, "small: tokenizer.ggml.scores has 1 entries where 259"),
        ({"scores": "high"}, "small: tokenizer.ggml.scores has no entries"),
        ({"model": None}, "small: tokenizer.ggml.model is missing"),
    ],
)
def test_broken_vocabularies_are_refused(change, message):
    data = small_bpe() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(TokenizerError, match=message):
        read_vocab(data, "small", add_bos=False, add_eos=False)
