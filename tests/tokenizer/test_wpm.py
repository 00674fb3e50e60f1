import pytest

from pykv.tokenizer import from_metadata

NORMAL = ["▁un", "aff", "able", "▁the", "▁", "!", "▁!", "▁我", "▁ecole", "▁e", "é", "▁É", "x"]


def bert(**keys: object) -> dict[str, object]:
    tokens = [*["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], *NORMAL]
    ids = {"padding": 0, "unknown": 1, "bos": 2, "seperator": 3, "mask": 4}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [t.encode() for t in tokens],
        "tokenizer.ggml.token_type": [3, 2, 3, 3, 3] + [1] * len(NORMAL),
        **{f"tokenizer.ggml.{k}_token_id": v for k, v in ids.items()},
        **{f"tokenizer.ggml.{k}": v for k, v in keys.items()},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unaffable", ["▁un", "aff", "able"]),
        ("UNaffable  the!", ["▁un", "aff", "able", "▁the", "▁!"]),
        ("unaffablezz the", ["[UNK]", "▁the"]),
        ("the我the", ["▁the", "▁我", "▁the"]),
        ("École", ["▁ecole"]),
        ("t\u200dhe\x00", ["▁the"]),
        ("the\u3000the\u2028the", ["▁the"] * 3),
        (b"the\xff", ["▁the"]),
        ("", []),
        ("[MASK]", ["[UNK]"] * 3),
    ],
)
def test_words_are_cut_greedily(text, expected):
    small = from_metadata(bert(), where="bert")
    texts = [small.token_text(i) for i in small.encode(text)]
    assert texts == ["[CLS]", *expected, "[SEP]"]
    assert [small.token_text(i) for i in small.encode(text, add_special=False)] == expected


def test_case_and_accents_are_kept_on_request():
    small = from_metadata(bert(**{"normalizer.lowercase": False}), where="bert")
    ids = small.encode("Éé É the", add_special=False)
    assert [small.token_text(i) for i in ids] == ["▁É", "é", "▁É", "▁the"]


def test_pieces_print_a_space_before_words():
    small = from_metadata(bert(), where="bert")
    assert small.decode(small.encode("unaffable the!")) == " unaffable the !"
