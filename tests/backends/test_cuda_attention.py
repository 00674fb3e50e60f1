"""The GPU backend's attention in Triton's interpreter, through the store's oracle.

Tiles are multiplied in float32 here, so that outputs keep the design's bound; what float16 does to
them is in tests/kernels/test_attention_triton.py.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from page_oracle import Formats  # noqa: E402
from test_cpu_attention_coded import encoded_sides, oracle_of  # noqa: E402

from pykv.backends import cuda  # noqa: E402
from pykv.backends.base import LayerShape  # noqa: E402
from pykv.kernels import launch_triton  # noqa: E402

# formats, tail and transforms; key and value width, query heads per KV head; sinks, residual
CASES = [
    (Formats("q8_0", "kivi2"), 32, 64, 4, 4, 0),
    (Formats("f16", "f16", None, "random", "hadamard"), 40, 32, 2, 0, 5),
    (Formats("tq4", "nuq4", "f32", calibrated=True), 64, 40, 3, 4, 64),
    (Formats("kivi2", "q4_0", None, "none", "lowrank:20", position="read", calibrated=True),
     40, 40, 1, 4, 0),
]  # fmt: skip


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    exact = launch_triton.operand(("f32",))
    monkeypatch.setattr(launch_triton, "operand", lambda types: exact)


def conversation(o, more=0):
    """A prompt, single tokens, several sequences in a batch, a fork, and back to an earlier end."""
    a, b = o.new(), o.new()
    o.write({a: o.tokens(75 + more)})
    o.write({a: o.tokens(1)})
    o.write({a: o.tokens(60), b: o.tokens(12)})
    c = o.fork(a)
    o.write({a: o.tokens(1), c: o.tokens(1), b: o.tokens(1)})
    o.check()
    o.truncate(c, len(o.sequences[c]) - 9)
    o.write({c: o.tokens(70)})
    o.free(a)
    o.write({c: o.tokens(1)})
    o.check()
    assert o.ever == encoded_sides(o)


@pytest.mark.parametrize(("formats", "d_k", "d_v", "group", "sinks", "residual"), CASES)
def test_prompts_tokens_forks_and_windows(formats, d_k, d_v, group, sinks, residual):
    shapes = [LayerShape(2 * group, 2, d_k, d_v), LayerShape(group, 1, d_k, d_v, window=77)]
    o = oracle_of(cuda.create(device="cpu"), formats, shapes, sinks, residual, seed=d_k)
    conversation(o, residual)
