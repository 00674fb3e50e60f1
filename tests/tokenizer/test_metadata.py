import logging

import pytest
from vocabs import CONTROL, small_bpe, small_spm

from pykv.errors import TokenizerError, UnsupportedError
from pykv.tokenizer import from_metadata


@pytest.mark.parametrize("model", ["t5", "rwkv", "plamo2", "none"])
def test_other_kinds_are_unsupported_in_one_sentence(model):
    with pytest.raises(UnsupportedError, match=f"^small: vocabularies of the kind '{model}' are"):
        from_metadata(small_bpe() | {"tokenizer.ggml.model": model}, where="small")


def test_an_unknown_pre_tokenizer_names_the_known():
    with pytest.raises(TokenizerError, match=r"pre is 'new-one'.*known: .*llama-bpe.*qwen2"):
        from_metadata(small_bpe(pre="new-one"), where="small")


def test_a_missing_pre_tokenizer_is_reported(caplog):
    data = small_bpe()
    del data["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        small = from_metadata(data, where="small")
    assert "small: tokenizer.ggml.pre is missing" in caplog.text
    default = from_metadata(small_bpe(pre="default"), where="small")
    assert small.encode("a$b 1234") == default.encode("a$b 1234")


@pytest.mark.parametrize(
    ("pre", "keys", "expected"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("chameleon", {}, True),
        ("qwen2", {}, False),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_whether_bos_is_added(pre, keys, expected):
    small = from_metadata(small_bpe(pre=pre, bos_token_id=5, **keys), where="small")
    assert small.add_bos is expected
    assert (small.encode("x")[0] == 5) is expected


def test_spm_adds_bos_unless_told_and_eos_if_told():
    small = from_metadata(small_spm(), where="small")
    assert small.encode("") == [1]
    assert small.encode("", add_special=False) == []
    small = from_metadata(small_spm(add_bos_token=False, add_eos_token=True), where="small")
    assert small.encode("") == [2]


def test_a_flag_without_its_token_is_reported_and_off(caplog):
    data = small_bpe(pre="glm4", add_bos_token=True)
    with caplog.at_level(logging.WARNING):
        small = from_metadata(data, where="small")
    assert not small.add_bos
    assert "add_bos_token is set but there is no such token" in caplog.text


def test_phi3_specials_swallow_blanks():
    data = small_spm(("<|end|>", CONTROL)) | {"general.name": "Phi-3 mini"}
    small = from_metadata(data, where="small")
    ids = small.encode("a<|end|> \n b<s> b", add_special=False, parse_special=True)
    texts = [small.token_text(i) for i in ids]
    assert texts == ["▁a", "<|end|>", "▁", "b", "<s>", "▁", "▁", "b"]


def test_mask_swallows_the_blanks_before_it():
    data = small_bpe(("<mask>", CONTROL), pre="jina-v2-code")
    small = from_metadata(data, where="small")
    ids = small.encode("a <mask> b", add_special=False, parse_special=True)
    assert [small.token_text(i) for i in ids] == ["a", "<mask>", "Ġ", "b"]
