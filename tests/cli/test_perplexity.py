import json

import pytest


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"one two\xff three\n\n")
    return file


def test_the_last_line_is_llama_perplexitys(pykv, corpus):
    result = pykv("perplexity", corpus)
    assert (result.code, result.out) == (0, "Final estimate: PPL = 12.3457 +/- 0.76543\n")
    assert "[1/2] PPL 12.0000" in result.err
    assert pykv("perplexity", "-f", corpus, "-q").err == ""


def test_the_engine_gets_the_bytes_less_one_newline_and_512_tokens(pykv, corpus):
    result = pykv("perplexity", corpus, "-m", "m.gguf", "--chunks", "3", "-ctk", "q8_0")
    load, run = result.calls[-2:]
    assert (load["model"], load["load"].ctx_size, load["cache"].type_k) == ("m.gguf", 512, "q8_0")
    assert run == {"text": b"one two\xff three\n", "ctx_size": 512, "chunks": 3}
    load, run = pykv("perplexity", corpus, "-c", "64").calls[-2:]
    assert (load["load"].ctx_size, run["ctx_size"], run["chunks"]) == (64, 64, None)


def test_standard_input(pykv):
    assert pykv("perplexity", "-", stdin=b"abc\n").calls[-1]["text"] == b"abc"


def test_json(pykv, corpus):
    found = json.loads(pykv("perplexity", corpus, "--json").out)
    assert (found["perplexity"], found["error"]) == (12.34567, 0.765432)
    assert (found["chunks"], found["tokens"], found["chunk_values"]) == (2, 510, [12.0, 12.7])
