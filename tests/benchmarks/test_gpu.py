"""The GPU's script runs through in Triton's interpreter, and counts bytes and verdicts rightly."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
pytest.importorskip("torch", reason="the GPU's tensors are not installed")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "engine"))


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A small model under SmolLM2's name, which the reference backend runs in the GPU's place."""
    import small_model

    import pykv
    from benchmarks import gpu_checks, gpu_model
    from pykv.engine import hub

    path = small_model.write_model(tmp_path / hub.find(gpu_model.FILE).file)

    @contextmanager
    def loaded(path, device, graphs, n_ctx):
        config = pykv.LoadConfig(device="reference", ctx_size=n_ctx)
        with pykv.load(str(path), load=config) as model:
            yield model

    def tokens(path, n):
        with loaded(path, "cpu", False, 64) as model:
            found = gpu_model.greedy(model, n)
        return SimpleNamespace(tokens=lambda seconds: found)

    monkeypatch.setattr(gpu_model, "loaded", loaded)
    monkeypatch.setattr(gpu_checks, "CpuTokens", tokens)
    return path


def test_the_whole_script(model, tmp_path, monkeypatch, capsys):
    from benchmarks import gpu
    from benchmarks.caches import cache_of
    from pykv.backends.base import LayerShape

    tiny = gpu.Sizes(LayerShape(4, 2, 32, 32), 2, (1,), 150, 1 << 16, 1, 3, (8, 12, 3), 1)
    monkeypatch.setattr(gpu, "TINY", tiny)
    monkeypatch.setattr(gpu, "TYPES", {t: cache_of(t) for t in ("f16", "q4_0")})
    out = tmp_path / "out.md"
    words = ["--device", "cpu", "--no-tests", "--models", str(model.parent), "--out", str(out)]
    status = gpu.main(words)
    text = capsys.readouterr().out
    assert status == 0, text
    assert out.read_text() == text
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(titles) == 6
    rows = [line.split(" | ") for line in text.splitlines()]
    assert [r[-1] for r in rows if r[0].startswith("| greedy tokens")] == ["the same 3 |"] * 2
    assert [r[0][2:] for r in rows if len(r) == 10 and "cache" not in r[0]][1:] == ["f16", "q4_0"]
    asked = [r for r in rows if len(r) == 4]
    assert sum(r[-1] == "**no** |" for r in asked) >= 2  # no interpreter is that fast
    assert sum(r[-1] == "not measured |" for r in asked) == 2  # q8_0 and kivi2


@pytest.fixture
def cache():
    import torch

    from benchmarks.caches import cache_of
    from benchmarks.gpu_attention import Cache
    from pykv.backends.base import LayerShape

    return Cache(cache_of("q4_0"), LayerShape(4, 2, 32, 32), 3, 2, 150, torch.device("cpu"))


def test_bytes_are_those_of_the_pages_that_are_read(cache):
    step = cache._begin(2)
    try:
        # 4 sinks in a page of 16 slots, a page of 18 bytes for 32 values, and two tail pages
        keys_or_values = (16 + 2 * 64) * 32 * 2 + 64 * 18
        assert cache._page_bytes(step) == keys_or_values * 2 * 2 * 3 * 2  # sides, heads, layers
        # queries and outputs as they are and mapped; one chunk of sums, with two numbers each
        assert cache._other_bytes(step) == 2 * 4 * 3 * 4 * (2 * 32 + 2 * 32 + 2 * (2 * 32 + 2))
    finally:
        cache.store.abort()


def test_wrong_outputs_are_no_figure(cache, monkeypatch):
    right = cache._values
    monkeypatch.setattr(cache, "_values", lambda kind, side: right(kind, side) * 1.05)
    with pytest.raises(RuntimeError, match="off by"):
        cache.measure("q4_0", 1, 1)


def test_layers_are_those_that_fit():
    from benchmarks.caches import cache_of
    from benchmarks.gpu_attention import layers_that_fit
    from pykv.backends.base import LayerShape

    shape = LayerShape(32, 8, 128, 128)
    # a layer of 4 sequences of 32k tokens takes half a GiB
    assert layers_that_fit(shape, cache_of("f16"), 32, 4, 32768, 139 << 30) == 32
    assert 15 <= layers_that_fit(shape, cache_of("f16"), 32, 4, 32768, 10 << 30) <= 16


def test_what_the_tests_said():
    from benchmarks.gpu_checks import _verdict, compared

    lines = [f"tests/gpu/test_products.py::test_products[{t}] PASSED [ 50%]" for t in ("f32", "x")]
    assert _verdict("\n".join(lines), 2, True, 1) == (True, "2 passed of 2, 1 s")
    assert _verdict("\n".join(lines), 3, False, 1)[0] is None
    lines.append("tests/gpu/test_steps.py::test_graphs[f16-q8_0] FAILED [ 75%]")
    lines.append("FAILED tests/gpu/test_steps.py::test_graphs[f16-q8_0] - AssertionError")
    verdict, said = _verdict("\n".join(lines), 3, True, 1)
    assert verdict is False
    assert said.endswith("test_steps.py::test_graphs[f16-q8_0]")
    assert compared([1, 2], [1, 2]) == "the same 2"
    assert compared([1, 2, 3], [1, 4, 3]) == "**differ** after 1 of 3"
