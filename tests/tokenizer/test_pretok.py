import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_oracles import pieces
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from pykv.tokenizer.pretok import FAMILIES, PRE_TOKENIZERS

# the engines know different versions of Unicode: only what the oldest, Python's own, has assigned
known = st.characters(codec="utf-8").filter(lambda c: unicodedata.category(c) not in ("Cn", "Co"))
near = st.sampled_from(
    " \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u2028\u200b\u3000'sStTrRlL1²٣Ⅳabc.,!?$+<=>^`|~_-/"
)
odd = st.sampled_from(
    ["'ll", "'RE", "'s", "e\u0301", "हिन्दी", "日本", "かな", "한국", "мояПеременная", "1234567"]
)
texts = st.lists(st.one_of(st.text(near, max_size=6), odd, st.text(known, max_size=4)), max_size=8)

joined = texts.map("".join)


def cut(family: str):
    steps = Sequence([Split(Regex(p), "isolated") for p in FAMILIES[family]])
    return lambda text: [piece for piece, _ in steps.pre_tokenize_str(text)]


@pytest.mark.parametrize("family", FAMILIES)
def test_oniguruma_cuts_as_python_regex(family):
    ours = cut(family)
    # the engines disagree on \b beside superscripts and marks; the models' own is Oniguruma
    given_texts = st.text("ab 123.,_", max_size=12) if family == "tiny-aya" else joined

    @settings(max_examples=50, deadline=None)
    @given(text=given_texts)
    def check(text):
        assert ours(text) == pieces(text, FAMILIES[family])

    check()


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("gpt2", "I'll go 123  x\n\n y", ["I", "'ll", " go", " 123", " ", " x", "\n\n", " y"]),
        ("gpt2", "I'LL", ["I", "'", "LL"]),
        ("digit", "a 12", ["a", " ", "1", "2"]),
        (
            "llama3",
            "I'LL 1234\n\nx (y)",
            ["I", "'LL", " ", "123", "4", "\n\n", "x", " (", "y", ")"],
        ),
        ("qwen2", "x 12", ["x", " ", "1", "2"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("qwen35", "हिन्दी 1", ["हिन्दी", " ", "1"]),
        ("gpt4o", "мояПеременная écoleÉtat", ["моя", "Переменная", " école", "État"]),
        ("gpt4o", "camelCase's HTTPServer", ["camel", "Case's", " HTTPServer"]),
        ("gpt4o", "e\u0301a 1234/\n", ["e\u0301a", " ", "123", "4", "/\n"]),
        ("tekken", "ItsMine 12", ["Its", "Mine", " ", "1", "2"]),
        ("deepseek3", "12345日本ab!c", ["123", "45", "日本", "ab", "!c"]),
        ("deepseek-llm", "ab 12\n日本 c!", ["ab", " ", "12", "\n", "日本", " c", "!"]),
        ("deepseek-coder", "ab 12\n!", ["ab", " ", "1", "2", "\n", "!"]),
        ("falcon", "a$b 12345", ["a", "$", "b", " ", "123", "45"]),
        ("default", "a$b 1234", ["a", "$", "b", " ", "123", "4"]),
        ("bloom", "a b, c", ["a", " b", ",", " c"]),
        ("superbpe", "a b 1234567", ["a b ", "1", "234", "567"]),
        ("tiny-aya", "1234567 x", ["1", "234", "567", " x"]),
        ("afmoe", "12345ab", ["12", "345", "ab"]),
        ("kimi-k2", "日本abcDef", ["日本", "abc", "Def"]),
    ],
)
def test_families_cut_as_described(family, text, expected):
    assert cut(family)(text) == expected


def test_flags_of_the_names():
    llama = PRE_TOKENIZERS["llama-bpe"]
    assert (llama.family, llama.ignore_merges, llama.add_bos) == ("llama3", True, True)
    assert PRE_TOKENIZERS["tekken"].add_bos
    assert not PRE_TOKENIZERS["glm4"].add_bos
    assert PRE_TOKENIZERS["glm4"].ignore_merges
    assert not PRE_TOKENIZERS["qwen2"].ignore_merges
    used = {p.family for p in PRE_TOKENIZERS.values()}
    assert used == FAMILIES.keys()
