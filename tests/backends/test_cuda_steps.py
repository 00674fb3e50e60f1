"""What a captured step may rely on: a replay sees nothing but device memory."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from verbs import Run  # noqa: E402

from pykv.backends import cuda  # noqa: E402
from pykv.backends.cuda_attention import CudaAttention  # noqa: E402
from pykv.backends.cuda_steps import Steps  # noqa: E402
from pykv.config import CacheConfig  # noqa: E402

TOKENS = np.random.default_rng(1).integers(0, 61, 80).astype(np.int32)


@pytest.fixture
def replays(monkeypatch):
    """Graphs are imitated: launches run again, with the step of their capture; counts replays."""
    counts = []

    def capture(self, key, launch, kind):
        encodes = kind == "encoding"
        # a capture does not run; what encodes must not run twice, the rest may
        result = None if encodes else launch()

        def replay():
            counts.append(encodes)
            again = launch()
            if result is not None:
                result.copy_(again)

        return replay, result

    real = CudaAttention.set

    def stale(self, step, tables):
        of_capture = getattr(self, "captured", step)
        real(self, step, tables)
        self.step = self.captured = of_capture

    monkeypatch.setattr(Steps, "_capture", capture)
    monkeypatch.setattr(CudaAttention, "set", stale)
    return counts


def logits(n_prompt, sizes, config, other=0):
    """Of a prompt and of what follows it, of one sequence or of two that take turns."""
    run = Run(cuda.create(device="cpu"), config)
    out = [run.read(TOKENS[:n_prompt])]
    second = run.store.fork(run.sequence)
    for i, n in enumerate(sizes):
        at = n_prompt + sum(sizes[:i])
        out.append(run.step([(run.sequence, TOKENS[at : at + n])]).copy())
        if other:
            out.append(run.step([(second, TOKENS[at : at + other])]).copy())
    run.backend.close()
    return np.concatenate(out)


@pytest.mark.parametrize(
    ("config", "sizes", "other"),
    [
        (CacheConfig("q4_0", "kivi2", residual=0), [1] * 4, 1),
        (CacheConfig("f16", "q8_0", transform_v="random", residual=0), [2, 2], 0),
    ],
)
def test_replays_give_the_launches_logits(replays, config, sizes, other):
    """Pages become full on the way, and tables are those of the sequence that is on."""
    n_prompt = 68 - 3  # the page after the sinks is full three tokens later
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "_capture", lambda self, key, launch, kind: None)
        expected = logits(n_prompt, sizes, config, other)
    replayed = logits(n_prompt, sizes, config, other)
    assert replays.count(False) >= len(sizes) * (1 + (other > 0)) - 2
    np.testing.assert_array_equal(replayed, expected)


def test_without_graphs_it_goes_on_and_says_so(caplog):
    steps = Steps(torch.device("cpu"), False, True)
    steps._met.add(("key",))

    class Broken:
        def __init__(self):
            raise RuntimeError("no graphs here\nand a page about why")

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "pykv"):
        patch.setattr(torch.cuda, "CUDAGraph", Broken)
        assert steps._capture(("key",), lambda: None, "decoding") is None
    assert not steps.graphs
    assert "goes on without CUDA graphs, and slower: no graphs here" in caplog.text


class Capture:
    """Stands for torch.cuda.graph: what is launched in it fails, or its end does."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise RuntimeError("the capture is broken")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug"), None])
def test_an_interrupt_during_a_capture_is_not_taken_for_its_failure(error, monkeypatch):
    steps = Steps(torch.device("cpu"), False, True)
    steps._met.add(("key",))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph", Capture)

    def launch():
        if error is not None:
            raise error

    if error is None:
        assert steps._capture(("key",), launch, "decoding") is None
        assert not steps.graphs
    else:
        with pytest.raises(type(error)):
            steps._capture(("key",), launch, "decoding")
        assert steps.graphs


def test_what_is_met_once_is_not_captured(monkeypatch):
    steps, made = Steps(torch.device("cpu"), False, True), []
    monkeypatch.setattr(steps, "_recorded", lambda launch, pool: made.append(launch))
    assert steps._capture(("key",), lambda: None, "decoding") is None
    assert not made
    with pytest.raises(TypeError):  # what is recorded here is no graph
        steps._capture(("key",), lambda: None, "decoding")
    assert len(made) == 1
