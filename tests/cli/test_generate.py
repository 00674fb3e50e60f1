import json

import pytest


def test_text_on_stdout_figures_on_stderr(pykv):
    result = pykv("generate", "-p", "hello")
    assert (result.code, result.out) == (0, "you said 'hello' \n")
    assert result.err == (
        "compiling kernels [1/2]\n"
        "3 prompt tokens (1 cached), 4.0 tokens/s; 3 generated, 12.0 tokens/s; seed 42\n"
    )
    assert pykv("generate", "-p", "hello", "-q").err == ""
    assert "fake kernels" in pykv("generate", "-p", "hello", "-v").err


def test_json(pykv):
    found = json.loads(pykv("generate", "m.gguf", "-p", "hello", "--json", "-n", "2").out)
    assert (found["model"], found["text"], found["tokens"]) == ("m.gguf", "you said ", [0, 1])
    assert (found["stats"]["finish"], found["stats"]["seed"]) == ("length", 42)
    assert found["stats"]["generated_tokens_per_second"] == 8.0


@pytest.mark.parametrize(
    ("n", "text"), [("0", "\n"), ("2", "you said \n"), ("-1", "you said 'x' \n")]
)
def test_n_limits_and_minus_one_does_not(pykv, n, text):
    for flag in ("-n", "--predict", "--n-predict", "--n_predict"):
        assert pykv("generate", "-p", "x", flag, n).out == text
    assert pykv("generate", "-p", "x", "-n", "-2").out == "you said 'x' \n"


def test_a_system_message_makes_the_prompt_a_turn_of_a_conversation(pykv):
    result = pykv("generate", "-p", "x", "-sys", r"be\nbrief ", "-n", "3")
    assert result.out == "you said 'be\\nbrief \n"


def test_a_full_context_is_said(pykv):
    result = pykv("generate", "-p", "brim")
    assert result.code == 0
    assert "the context is full: the text was cut here" in result.err


@pytest.mark.parametrize("length", [0, 1, 1_000_000])
def test_input_of_any_length(pykv, length):
    data = b"x" * length
    assert pykv("generate", stdin=data).out == f"you said '{'x' * length}' \n"


@pytest.mark.parametrize(
    ("data", "text", "n_bad"),
    [
        (b"a\x00b", "a\x00b", 0),
        (b"\xff\xfe", "\ufffd\ufffd", 2),
        ("\ufffd".encode(), "\ufffd", 0),
        ("é".encode()[:1], "\ufffd", 1),
    ],
)
def test_odd_bytes(pykv, tmp_path, data, text, n_bad):
    file = tmp_path / "prompt"
    file.write_bytes(data)
    for result in (pykv("generate", stdin=data), pykv("generate", "-f", file)):
        assert result.out == f"you said {text!r} \n"
        assert (f"{n_bad} faults became U+FFFD" in result.err) == (n_bad > 0)


def test_bytes_of_an_argument_that_are_no_utf8(pykv):
    # so Python hands over an argument with the byte 0xff
    result = pykv("generate", "-p", "a\udcffb")
    assert result.out == "you said 'a\ufffdb' \n"


def test_the_model_is_closed(pykv, engine):
    opened = []
    init = engine.Model.__init__

    def spy(self, path):
        init(self, path)
        opened.append(self)

    engine.Model.__init__ = spy
    pykv("generate", "-p", "x")
    assert [m.closed for m in opened] == [True]
