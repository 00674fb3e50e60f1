import json
import os
import signal
import subprocess
import sys
import time

import pytest

import pykv as package
from pykv.cli import app

STEMS = ["chat", "generate", "inspect", "models", "perplexity", "pull", "tokenize"]


def test_a_command_is_a_file():
    assert set(STEMS) <= set(app.stems())
    assert not {"app", "options", "render"} & set(app.stems())


def test_help_lists_every_command_with_its_first_sentence(pykv):
    for args in (["--help"], ["-h"], []):
        result = pykv(*args)
        assert (result.code, result.err) == (0, "")
        for stem in app.stems():
            assert f"\n  {stem} " in result.out


@pytest.mark.parametrize("stem", STEMS)
def test_every_command_has_help_with_an_example(pykv, stem):
    result = pykv(stem, "--help")
    assert (result.code, result.err) == (0, "")
    usage, _, example = result.out.partition("\nExample:\n")
    assert usage.startswith(f"Usage: pykv {stem} ")
    assert f"\n  pykv {stem}" in "\n" + example
    assert "--json" in usage


def test_version(pykv):
    assert pykv("--version").out == f"pykv {package.__version__}\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["chat", "--tempp", "1"], "No such option: --tempp"),
        (["chat", "--temp"], "requires an argument"),
        (["chat", "--temp", "hot"], "'hot' is not a number"),
        (["chat", "-n", "1.5"], "'1.5' is not a whole number"),
        (["generate", "-p", "x", "--kv-sinks", "99"], "kv sinks must be 0 to 64"),
        (["generate", "-p", "x", "-n", "-3"], "predict must be"),
        (["generate", "-p", "x", "-v", "-q"], "-v and -q contradict"),
        (["generate", "-p", "x", "-f", "y"], "both -p and -f"),
        (["generate", "-p", "x", "a.gguf", "-m", "b.gguf"], "two models were named"),
        (["generate", "-p", "x", "-m", "b.gguf", "-hf", "a/b"], "two models were named"),
        (["generate"], "no prompt"),
        (["chat", "-p", " "], "the message is empty"),
        (["chat", "--json"], "--json needs one message"),
        (["perplexity"], "no text"),
        (["perplexity", "a", "-f", "b"], "two texts"),
        (["perplexity", "a", "--chunks", "0"], "chunks must be"),
        (["tokenize"], "no text"),
        (["tokenize", "a", "-p", "b"], "several texts"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(pykv, args, sentence):
    result = pykv(*args)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert sentence in result.err


@pytest.mark.parametrize(
    ("model", "code", "sentence"),
    [
        ("broken.gguf", 1, "error: broken.gguf: truncated, expected more \u241b[31mbytes\n"),
        ("disk.gguf", 1, "error: /cache/kernels: the disk is full, make room on it\n"),
        ("interrupted.gguf", 130, ""),
    ],
)
def test_what_goes_wrong_is_one_line(pykv, model, code, sentence):
    result = pykv("generate", model, "-p", "x")
    assert (result.code, result.out, result.err) == (code, "", sentence)


def test_no_memory_is_one_line(pykv):
    result = pykv("generate", "big.gguf", "-p", "x")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: the memory does not suffice")


def test_a_missing_file_is_one_line(pykv):
    result = pykv("generate", "-f", "/nowhere/x.txt")
    assert (result.code, result.err) == (1, "error: /nowhere/x.txt: No such file or directory\n")


def test_help_loads_typer_only():
    program = (
        "import sys; from pykv.cli.app import run; run(['--help']); run(['chat', '--help']);"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in"
        " ('numpy', 'numba', 'torch', 'rich', 'jinja2', 'pydantic', 'huggingface_hub')"
        " or m.startswith('pykv.engine')), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"


def test_a_command_starts_without_pydantic(process):
    done = process("generate", "-p", "x", "--temp", "1", "-n", "2", "-r", "z", stdout=-1, stderr=-1)
    out, err = done.communicate(timeout=20)
    assert (done.returncode, out) == (0, b"you said \n")
    program = (
        "import sys; from pykv.cli.app import run; "
        "run(['generate', '-f', '/nowhere', '--temp', '1']); print('pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", err


def test_a_reader_that_leaves_is_no_error(process):
    read, write = os.pipe()
    program = process("generate", "-p", "slow", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert os.read(read, 4) == b"you "
    os.close(read)
    _, err = program.communicate(timeout=20)
    assert program.returncode == 141
    assert b"Traceback" not in err
    assert b"rror" not in err


def test_ctrl_c_ends_generate_quietly(process):
    program = process(
        "generate", "-p", "slow", "-q", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout.read(4) == b"you "
    start = time.monotonic()
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=20)
    assert (program.returncode, err) == (130, b"")
    assert time.monotonic() - start < 2


def test_pykv_model_is_the_default_and_a_named_model_outranks_it(pykv, monkeypatch):
    def model(*args, env="env.gguf"):
        monkeypatch.setenv("PYKV_MODEL", env)
        result = pykv("generate", "-p", "x", *args)
        assert result.code == 0, result.err
        return result.calls[-1]["model"]

    assert model() == "env.gguf"
    assert model("named.gguf") == "named.gguf"
    assert model("-m", "named.gguf") == "named.gguf"
    assert model("-hf", "user/repo:Q8_0") == "hf:user/repo:Q8_0"
    assert model("named.gguf", "-m", "named.gguf") == "named.gguf"
    assert model(env="") is None
    assert "PYKV_MODEL" in pykv("generate", "--help").out


def test_json_is_all_there_is_on_stdout(pykv, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(b"x" * 2000)
    for args in (
        ["generate", "-p", "hello"],
        ["chat", "-p", "hello"],
        ["perplexity", corpus],
        ["models"],
    ):
        result = pykv(*args, "--json")
        assert result.code == 0, result.err
        assert isinstance(json.loads(result.out), dict)
