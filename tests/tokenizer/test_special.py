from hypothesis import given
from hypothesis import strategies as st

from pykv.tokenizer.special import Partition, Special


def specials(*texts: str, guarded: bool = False, **eats: bool) -> list[Special]:
    return [Special(t.encode(), i, guarded, **eats) for i, t in enumerate(texts)]


def shown(data: str, parts) -> list[object]:
    return [p if isinstance(p, int) else data.encode()[p[0] : p[1]].decode() for p in parts]


def naive(data: bytes, tokens: list[Special]) -> list[object]:
    """tokenizer_st_partition without its tricks: every token, longest first, on every stretch."""
    parts: list[object] = [data] if data else []
    for token in sorted(tokens, key=lambda s: (-len(s.text), s.id)):
        out: list[object] = []
        for part in parts:
            if isinstance(part, int):
                out.append(part)
                continue
            for i, stretch in enumerate(part.split(token.text)):
                out += [token.id] * (i > 0) + [stretch] * bool(stretch)
        parts = out
    return parts


@given(
    texts=st.lists(st.text("<ab|>", min_size=1, max_size=5), min_size=1, max_size=12, unique=True),
    data=st.text("<ab|> ", max_size=60),
)
def test_equals_the_naive_partition(texts, data):
    tokens = specials(*texts)
    parts = Partition(tokens).split(data.encode(), guarded=False)
    expected = [p if isinstance(p, int) else p.decode() for p in naive(data.encode(), tokens)]
    assert shown(data, parts) == expected


def test_the_longest_token_wins_not_the_earliest():
    assert shown("abcd", Partition(specials("ab", "bcd")).split(b"abcd", guarded=False)) == ["a", 1]


def test_guarded_tokens_are_matched_only_on_request():
    both = Partition(specials("<a>", guarded=True) + [Special(b"<b>", 7, guarded=False)])
    assert shown("<a><b>", both.split(b"<a><b>", guarded=False)) == ["<a>", 7]
    assert shown("<a><b>", both.split(b"<a><b>", guarded=True)) == [0, 7]


def test_blanks_are_swallowed():
    right = Partition(specials("<a>", eats_right=True))
    assert shown("x <a> \n y", right.split(b"x <a> \n y", guarded=False)) == ["x ", 0, "y"]
    left = Partition(specials("<m>", eats_left=True))
    assert shown(" \t<m> y", left.split(b" \t<m> y", guarded=False)) == [0, " y"]


def test_a_guarded_token_that_touches_a_user_range_stays_text():
    one = Partition(specials("<a>", guarded=True))
    data = "<a>x<a><a>"
    for user in [(3, 5), (4, 7), (6, 7), (5, 6)]:
        parts = one.split(data.encode(), guarded=True, user=[user])
        assert shown(data, parts) == [0, "x<a>", 0]
    assert shown(data, one.split(data.encode(), guarded=True, user=[(3, 4)])) == [0, "x", 0, 0]
    assert shown(data, one.split(data.encode(), guarded=True, user=[(0, 10)])) == [data]


def test_present_finds_tokens_among_thousands():
    many = Partition(specials(*(f"<unused{i}>" for i in range(6000)), "<unk>"))
    found = many.present(b"<unk> <unk> <unused777> <unused", guarded=False)
    assert [s.text for s in found] == [b"<unused777>", b"<unk>"]
