"""Commands on real and on broken files, and settings that make no sense, on the real engine."""

import json
import re
from pathlib import Path

import pytest

from pykv.cli import app


@pytest.mark.models
class TestFiles:
    """Commands that read a file's header, within this process."""

    @pytest.fixture
    def call(self, capfd):
        def run_here(*args):
            code = app.run([str(a) for a in args])
            out, err = capfd.readouterr()
            return code, out, err

        return run_here

    @pytest.mark.parametrize(
        ("fixture", "name"),
        [
            ("smollm2_path", "smollm2-135m-instruct-q4_1"),
            ("gemma_path", "gemma-3-270m-q4_k_m"),
        ],
    )
    def test_tokenize(self, call, request, fixture, name, shared_data, tmp_path):
        known = json.loads((shared_data / "reference.json").read_text())
        expected = known["first tokens (no BOS)"][name]
        path = tmp_path / "text.txt"
        path.write_bytes((shared_data / "wikitext2.test.txt").read_bytes()[:300])
        model = request.getfixturevalue(fixture)
        code, out, err = call("tokenize", "-f", path, "-m", model, "--no-bos", "--ids")
        assert (code, err) == (0, "")
        assert json.loads(out)[: len(expected)] == expected

    @pytest.mark.parametrize(
        ("fixture", "architecture", "layers", "f16_bytes"),
        [
            # layers x KV heads x width x 2 sides x 2 bytes
            ("smollm2_path", "llama", 30, 30 * 3 * 64 * 4),
            ("gemma_path", "gemma3", 18, 18 * 1 * 256 * 4),
        ],
    )
    def test_inspect(self, call, request, fixture, architecture, layers, f16_bytes):
        path = request.getfixturevalue(fixture)
        code, out, err = call("inspect", path, "--json")
        found = json.loads(out)
        assert (code, err, found["architecture"]) == (0, "", architecture)
        assert found["model"]["layers"] == layers
        costs = {c["type"]: c["bytes"] for c in found["cache"]}
        assert costs["f16"] == costs["bf16"] == costs["f32"] / 2 == f16_bytes
        # a layer of llama has 9 tensors, of Gemma 3 with its four more norms 13; the embedding
        # and the last norm
        assert found["tensors"]["count"] == layers * {"llama": 9, "gemma3": 13}[architecture] + 2
        assert 0.9 * path.stat().st_size < found["tensors"]["bytes"] < path.stat().st_size
        code, out, err = call("inspect", path)
        assert (code, err) == (0, "")
        assert re.search(rf"^layers +{layers}$", out, re.MULTILINE)
        assert "f16 " in out


BROKEN = ["random", "half", "cut", "empty", "folder", "missing"]
COMMANDS = {
    "inspect": ("inspect", "{}"),
    "tokenize": ("tokenize", "text", "-m", "{}"),
    "generate": ("generate", "{}", "-p", "text"),
    "chat": ("chat", "{}", "-p", "text"),
    "perplexity": ("perplexity", __file__, "-m", "{}"),
}


@pytest.fixture
def broken(reciter, tmp_path):
    whole = Path(reciter).read_bytes()
    path = tmp_path / "broken.gguf"

    def make(kind):
        if kind == "folder":
            path.mkdir(exist_ok=True)
        elif kind != "missing":
            path.write_bytes({
                "random": bytes(range(256)) * 40,
                "half": whole[: len(whole) // 2],
                "cut": whole[:1000],
                "empty": b"",
            }[kind])  # fmt: skip
        return str(path)

    return make


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_broken_file_is_one_line(broken, capfd, command, kind):
    code = app.run([a.format(broken(kind)) for a in COMMANDS[command]])
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: .*broken\.gguf.*\n", err)


def test_a_broken_file_in_a_process_of_its_own(broken, run):
    code, out, err = run("inspect", broken("half"))
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: .*broken\.gguf.*\n", err)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--device", "cuda", "-ngl", "0"), 2, "contradict each other"),
        (("-ngl", "some"), 2, "n-gpu-layers must be auto, all or a number of layers"),
        (("--device", "nonsense"), 2, "device 'nonsense' is unknown"),
        (("-t", "0"), 2, "threads must be 1 to 1024, not 0"),
        (("-c", "-1"), 2, "ctx-size must be 0 or more"),
        (("-ctk", "q9_9"), 2, "unknown cache type 'q9_9'"),
        (("-c", "2000000000"), 1, "does not fit the"),
        (("--kv-tail-type", "q8_0"), 2, "kv tail type 'q8_0' is unknown"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(reciter, capfd, args, code, message):
    assert app.run(["generate", reciter, "-p", "x", *args]) == code
    out, err = capfd.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
