"""A whole model on a GPU: its greedy tokens, and how fast it reads and decodes.

`python -m benchmarks.gpu_model FILE N` prints the CPU backend's greedy tokens as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pykv
from benchmarks.speed import GREEDY, tokens_of
from pykv.backends import cuda

FILE = "smollm2-135m-instruct"  # of the catalogue
TEXT = "The capital of France is"
DROPPED = 1  # samples that are not counted


@contextmanager
def loaded(path: Path, device: str, graphs: bool, n_ctx: int) -> Iterator[pykv.Model]:
    """The model on the GPU, or with the device "cpu" in Triton's interpreter."""
    made = partial(cuda.create, device=device, graphs=graphs)
    config = pykv.LoadConfig(device="cuda", ctx_size=n_ctx)
    with (
        mock.patch.object(cuda, "create", made),
        mock.patch.object(cuda, "missing", return_value=None),
        pykv.load(str(path), load=config) as model,
    ):
        yield model


def greedy(model: pykv.Model, n: int) -> list[int]:
    """The n tokens that follow the text."""
    generation = model.generate(TEXT, max_tokens=n, sampling=GREEDY)
    for _ in generation:
        pass
    return list(generation.tokens)


def _ids(model: pykv.Model, n: int) -> list[int]:
    return [i % model.n_vocab for i in tokens_of(n)]


def decoding(model: pykv.Model, before: int, n: int, repeat: int) -> float:
    """Tokens a second of greedy decoding after `before` tokens: the median.

    n tokens are drawn, and the n - 1 that are read after the first are timed, drawing included;
    each token comes to the host before the next step begins.
    """
    base, samples = model.session(), []
    if before:
        base.read(_ids(model, before))
    for _ in range(repeat + DROPPED):
        session = base.fork()
        generation = session.generate(_ids(model, 1), max_tokens=n, sampling=GREEDY)
        for _ in generation:
            pass
        samples.append((n - 1) / generation.stats.generated_seconds)
        session.free()
    base.free()
    return statistics.median(samples[DROPPED:])


def reading(model: pykv.Model, n: int, repeat: int) -> float:
    """Tokens a second of reading a prompt of n, up to the last one's logits: the median."""
    ids, samples = _ids(model, n), []
    for _ in range(repeat + DROPPED):
        session = model.session()
        started = time.perf_counter()
        session.read(ids)  # the logits come to the host
        samples.append(n / (time.perf_counter() - started))
        session.free()
    return statistics.median(samples[DROPPED:])


def speeds(
    path: Path, device: str, sizes: tuple[int, int, int], repeat: int
) -> Iterator[tuple[str, Callable[[], float]]]:
    """What is measured, and the measurement, which must run before the next is asked for.

    sizes: tokens in the cache before decoding, tokens of a prompt, tokens that are drawn.
    """
    deep, prompt, n = sizes
    for graphs in (True, False):
        how = "CUDA graphs" if graphs else "a launch for each kernel"
        with loaded(path, device, graphs, deep + prompt + 2 * n) as model:
            for before in (0, deep):
                what = f"decoding after {before:,} tokens, {how}"
                yield what, partial(decoding, model, before, n, repeat)
            if graphs:
                yield f"reading a prompt of {prompt:,}", partial(reading, model, prompt, repeat)


def main(argv: list[str]) -> int:
    """The CPU backend's tokens."""
    path, n = argv
    with pykv.load(path, load=pykv.LoadConfig(device="cpu", ctx_size=256)) as model:
        print(json.dumps(greedy(model, int(n))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
