import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabs import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    small_bpe,
    small_spm,
    tokenizer,
    vocab_file,
)

from pykv.errors import TokenizerError
from pykv.tokenizer import Span, from_metadata

SPECIALS = (("<|x|>", CONTROL), ("  ", USER_DEFINED), ("gone", UNUSED), ("日本", NORMAL))


@pytest.fixture(scope="module")
def small():
    return from_metadata(small_bpe(*SPECIALS), where="small")


@pytest.fixture(scope="module")
def spm():
    return from_metadata(small_spm(("\n\n", USER_DEFINED)), where="spm")


def test_what_each_kind_of_token_prints(small, spm):
    assert small.piece(259) == b""
    assert small.piece(259, special=True) == b"<|x|>"
    assert small.piece(260) == b"  "
    assert small.piece(261, special=True) == b""
    assert small.piece(262) == "日本".encode()  # not in the byte alphabet: it stands for itself
    assert small.decode(small.encode("hell no")) == "hell no"
    assert spm.piece(3 + 0xE9) == b"\xe9"
    assert spm.piece(0, special=True) == b"<unk>"
    assert spm.decode(spm.encode("ab <s>")) == " ab <s>"


def test_properties(small, spm):
    assert (small.n_vocab, small.bos, small.eos, small.unk) == (263, 11, 11, None)
    assert (spm.bos, spm.eos, spm.unk, spm.add_bos, spm.add_eos) == (1, 2, 0, True, False)
    assert spm.eog == {2}
    assert (small.is_control(259), small.is_control(260)) == (True, False)
    assert small.token_text(259) == "<|x|>"


@pytest.mark.parametrize("token", [-1, 263])
def test_ids_that_do_not_exist_are_refused(small, token):
    for use in (small.piece, small.token_text, small.is_control, lambda i: small.decode([i])):
        with pytest.raises(TokenizerError, match=f"^small: there is no token {token}; ids run"):
            use(token)


def test_control_tokens_need_parse_special_and_user_defined_do_not(small):
    assert 259 not in small.encode("a<|x|>")
    assert 259 in small.encode("a<|x|>", parse_special=True)
    assert 260 in small.encode("a  b")


def test_structural_tokens_print_and_match_but_not_in_a_users_text():
    small = from_metadata(small_bpe(("<|start|>", CONTROL)), where="small")
    assert small.piece(259) == b"<|start|>"
    assert small.encode("<|start|>") == [259]
    assert small.encode_spans([Span("<|start|>", False)]) == [259]
    assert 259 not in small.encode_spans([Span("<|start|>", True)])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udce9\ud83d"])
def test_lone_surrogates_become_replacement_characters(small, spm, text):
    clean = "".join(["\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text])
    for each in (small, spm):
        assert each.encode(text) == each.encode(clean)


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\x00\x00ab"])
def test_nul_is_a_character(small, spm, text):
    assert small.decode(small.encode(text)) == text
    assert spm.decode(spm.encode(text)) == " " + text


@settings(max_examples=300, deadline=None)
@given(data=st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=4).map(str.encode))))
def test_the_stream_equals_the_whole(data):
    small = from_metadata(SMALL_SPM, where="spm")
    ids = [3 + byte for byte in b"".join(data)]
    stream = small.stream()
    parts = [stream.push(i) for i in ids]
    assert "".join([*parts, stream.flush()]) == small.decode(ids)


SMALL_SPM = small_spm()


@given(text=st.text(max_size=30))
def test_streamed_characters_come_whole(text):
    small = from_metadata(SMALL_SPM, where="spm")
    stream = small.stream()
    seen = ""
    for byte in text.encode():
        seen += stream.push(3 + byte)
        assert text.startswith(seen)
    assert seen == text
    assert stream.flush() == ""


def test_specials_are_streamed_on_request(small):
    assert small.stream(special=True).push(259) == "<|x|>"
    assert small.stream().push(259) == ""


spans = st.lists(st.tuples(st.text("ab <|x>é\n", max_size=8), st.booleans()), max_size=6)


@settings(max_examples=200, deadline=None)
@given(parts=spans)
def test_spans_without_control_texts_are_as_the_whole_text(parts):
    path = vocab_file("gpt-2")
    whole = "".join([t for t, _ in parts])
    ids = tokenizer(path).encode_spans([Span(t, u) for t, u in parts])
    assert ids == tokenizer(path).encode(whole, parse_special=True)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["<|x|>", "<|", "x|>", "x", "|>", "hell", " "]), st.booleans()),
        max_size=8,
    )
)
def test_a_users_text_never_becomes_a_control_token(parts):
    small = from_metadata(SMALL_BPE, where="small")
    ids = small.encode_spans([Span(t, u) for t, u in parts])
    # what the template says, with a gap where the user speaks
    said = "".join(["\0" if u else t for t, u in parts])
    assert ids.count(259) == said.count("<|x|>")
    assert small.decode(ids, special=True) == "".join([t for t, _ in parts])


SMALL_BPE = small_bpe(("<|x|>", CONTROL))


def test_controls_in_a_text(small):
    assert small.controls_in("a <|x|>  b") == ["<|x|>"]
    assert small.controls_in("a |x|>") == []
