"""Checks and measures the GPU backend: `python -m benchmarks.gpu`, which ends within six minutes.

In this order: what the machine is, correctness, the copy bandwidth, attention over long caches, a
whole model, and the bars. Every line is written as soon as it is known, so that a time limit leaves
what was measured before it. Without a GPU, TRITON_INTERPRET=1 and `--device cpu` run the same
script in tiny sizes in Triton's interpreter; its figures then mean nothing.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton

from benchmarks import gpu_attention, gpu_checks, gpu_model
from benchmarks.caches import cache_of
from benchmarks.gpu_attention import Cache, Measured
from benchmarks.report import command_output
from pykv.backends.base import LayerShape
from pykv.config import CacheConfig
from pykv.engine import hub
from pykv.kernels.jit_triton import is_interpreted

LIMIT_S = 345  # of the whole script
TYPES = {
    "f16": cache_of("f16"),
    "q8_0": cache_of("q8_0"),
    "q4_0": cache_of("q4_0"),
    "kivi2": cache_of("kivi2"),
    "q4_0, no transform": cache_of("q4_0", transform_k="none", transform_v="none"),
}
MORE = ("fp8_e4m3", "int8", "kivi4", "tq4", "kivi4/kivi2")  # where time is left
SHARES = {"f16": 0.75, "q8_0": 0.75, "q4_0": 0.6, "kivi2": 0.6}  # of the copy bandwidth
FASTER = 2.2  # q4_0 over f16
DECODING = 800  # tokens/s of SmolLM2, empty cache
PROGRAMS = (4, 8, 32)  # of a multiprocessor, beside the backend's, where time is left


@dataclass(frozen=True)
class Sizes:
    """What is measured: on a GPU, and in the interpreter."""

    shape: LayerShape = LayerShape(32, 8, 128, 128)  # Llama-3-8B's
    layers: int = 32
    sequences: tuple[int, ...] = (4, 1)
    tokens: int = 32768
    copy_bytes: int = 2 << 30
    repeat: int = 20
    greedy: int = 24
    model: tuple[int, int, int] = (4096, 512, 128)  # see gpu_model.speeds
    model_repeat: int = 5


TINY = Sizes(LayerShape(4, 2, 32, 32), 2, (2, 1), 220, 1 << 20, 1, 3, (8, 12, 3), 1)


@dataclass
class Run:
    """One run of the script: settings, what was found, and where it goes."""

    device: torch.device
    sizes: Sizes
    limit: float  # seconds
    file: Path | None
    started: float = field(default_factory=time.monotonic)
    correct: bool | None = None  # None: not known
    copy: float | None = None
    attention: dict[tuple[str, int], Measured] = field(default_factory=dict)
    decoding: float | None = None

    def say(self, line: str = "") -> None:
        """Write a line to stdout and to the file, at once."""
        print(line, flush=True)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def left(self) -> float:
        """Seconds before the limit."""
        return self.limit - (time.monotonic() - self.started)

    def row(self, *cells: object) -> None:
        """A row of a table."""
        self.say(f"| {' | '.join(map(str, cells))} |")

    def head(self, title: str, *cells: str) -> None:
        """A title, and a table's head; the first column holds words, the others numbers."""
        self.say(f"\n## {title}\n")
        self.row(*cells)
        self.row("---", *["---:"] * (len(cells) - 1))


def facts(run: Run) -> None:
    """The machine, the versions and the commit."""
    run.head("Facts", "what", "value")
    found = {"GPU": "none, Triton's interpreter: **figures mean nothing**"}
    if run.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(run.device)
        driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found = {
            "GPU": gpu.name,
            "memory": f"{gpu.total_memory / 2**30:.1f} GiB",
            "multiprocessors": gpu.multi_processor_count,
            "L2": f"{getattr(gpu, 'L2_cache_size', 0) / 2**20:.0f} MiB",
            "driver": command_output(*driver) or "not told",
            "CUDA or ROCm": torch.version.cuda or torch.version.hip,
        }
    changed = " and changes" * bool(command_output("git", "status", "--porcelain"))
    found |= {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "pykv": (command_output("git", "rev-parse", "HEAD") or "commit not told") + changed,
    }
    for what, value in found.items():
        run.row(what, value)


def correctness(run: Run, model: Path | None, tests: bool) -> None:
    """The tests of tests/gpu, and a model's greedy tokens three ways; all at the same time."""
    run.head("Correctness", "check", "result")
    verdicts: list[bool | None] = []
    cpu = gpu_checks.CpuTokens(model, run.sizes.greedy) if model else None
    suite = gpu_checks.Suite(60) if tests else None
    if model and cpu:
        verdicts += _tokens(run, model, cpu)
    else:
        run.row("greedy tokens", "left out: the model is not here")
    if suite:
        # what is left for figures: attention, and a model
        verdict, text = suite.result(max(run.left() - 180, 30))
        verdicts.append(verdict)
        run.row("tests/gpu: cache types, weight types, captured steps", text)
    else:
        run.row("tests/gpu", "left out")
    run.correct = False if False in verdicts else None if None in verdicts else True
    if not run.correct:
        run.say("\n**Not everything was found correct: the figures below do not count.**")


def _tokens(run: Run, model: Path, cpu: gpu_checks.CpuTokens) -> list[bool | None]:
    found = {}
    for graphs in (True, False):
        with gpu_model.loaded(model, str(run.device), graphs, 256) as loaded:
            found[graphs] = gpu_model.greedy(loaded, run.sizes.greedy)
    same = gpu_checks.compared(found[True], found[False])
    run.row("greedy tokens, with graphs and without", same)
    expected = cpu.tokens(max(run.left() - 200, 20))
    if expected is None:
        run.row("greedy tokens, GPU and CPU backend", f"**not known**: {cpu.why}")
        return [found[True] == found[False], None]
    same = gpu_checks.compared(found[True], expected)
    run.row("greedy tokens, GPU and CPU backend", same)
    return [found[True] == found[False], found[True] == expected]


def copying(run: Run) -> None:
    """What the memory bus does at most, as torch's copy has it."""
    size = run.sizes.copy_bytes
    run.copy = gpu_attention.copy_bandwidth(size, run.sizes.repeat, run.device)
    run.say("\n## Copy bandwidth\n")
    run.say(
        f"torch's copy of {size / 2**20:,.0f} MiB, bytes read plus written, median of "
        f"{run.sizes.repeat}: **{run.copy / 1e9:,.0f} GB/s**"
    )


def attention(run: Run) -> None:
    """Attention by cache type, with several sequences and with one."""
    s = run.sizes
    layers, less = s.layers, ""
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # of what was copied
        free = torch.cuda.mem_get_info(run.device)[0]
        layers = gpu_attention.layers_that_fit(
            s.shape, TYPES["f16"], s.layers, max(s.sequences), s.tokens, free
        )
        less = f" (of {s.layers}: more do not fit the free memory)" * (layers < s.layers)
    run.head(
        f"Attention: {s.tokens:,} tokens, {s.shape.n_head} query heads, {s.shape.n_kv} KV heads of "
        f"{s.shape.d_k}, {layers} layers{less} in one graph, median of {s.repeat}",
        "cache", "sequences", "pages, GB", "all, GB", "µs", "fastest, µs", "GB/s", "of copy",
        "f16's time over it", "error",
    )  # fmt: skip
    more = {name: cache_of(name) for name in MORE} if run.device.type == "cuda" else {}
    for label, config in (TYPES | more).items():
        # a model's figures come before those of other types
        if run.left() < (60 if label in TYPES else 140):
            run.row(label, "left out: no time", *[""] * 8)
            continue
        _attend(run, label, config, layers)


def _attend(run: Run, label: str, config: CacheConfig, layers: int) -> None:
    s = run.sizes
    torch.cuda.empty_cache()  # the pages of the type before
    try:
        cache = Cache(config, s.shape, layers, max(s.sequences), s.tokens, run.device)
        for n in s.sequences:
            measured = cache.measure(label, n, s.repeat)
            run.attention[label, n] = measured
            _row(run, measured, label)
        if label in ("f16", "q4_0") and run.device.type == "cuda":
            for programs in PROGRAMS:
                if run.left() > 170:
                    again = gpu_attention.with_programs(
                        programs, lambda: cache.measure(label, max(s.sequences), s.repeat)
                    )
                    _row(run, again, f"{label}, {programs} programs per SM")
    except Exception as error:  # whatever one type fails with, the next is measured
        if label in TYPES:
            run.correct = False
        run.row(label, f"**failed**: {type(error).__name__}: {_first_line(error)}", *[""] * 8)


def _row(run: Run, m: Measured, label: str) -> None:
    f16 = run.attention.get(("f16", m.sequences))
    share = f"{m.bandwidth / run.copy:.1%}" if run.copy else ""
    ratio = f"{f16.seconds / m.seconds:.2f}" if f16 else ""
    run.row(
        label, m.sequences, f"{m.page_bytes / 1e9:.3f}",
        f"{(m.page_bytes + m.other_bytes) / 1e9:.3f}", f"{m.seconds * 1e6:,.0f}",
        f"{m.fastest * 1e6:,.0f}", f"{m.bandwidth / 1e9:,.0f}", share, ratio, f"{m.error:.0e}",
    )  # fmt: skip


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].replace("|", "/")[:200] if lines else ""


def whole_model(run: Run, model: Path | None) -> None:
    """Tokens a second of a model."""
    s = run.sizes
    run.head(f"SmolLM2, greedy, median of {s.model_repeat}", "what", "tokens/s")
    if model is None:
        run.row("left out: the model is not here", "")
        return
    for what, measure in gpu_model.speeds(model, str(run.device), s.model, s.model_repeat):
        if run.left() < 10:
            run.row(what, "no time")
            continue
        speed = measure()
        if run.decoding is None:  # the first: after no tokens, with graphs
            run.decoding = speed
        run.row(what, f"{speed:,.0f}")


def bars(run: Run) -> None:
    """What issue 4 asks for."""
    run.head("Bars", "bar", "asked for", "found", "reached")
    most = max(run.sizes.sequences)

    def bar(what: str, least: float, found: float | None, shown: str) -> None:
        verdict = "not measured" if found is None else "yes" if found >= least else "**no**"
        if found is not None and not run.correct:
            verdict += ", but not all was found correct"
        run.row(what, shown.format(least), "" if found is None else shown.format(found), verdict)

    for label, share in SHARES.items():
        m = run.attention.get((label, most))
        found = m.bandwidth / run.copy if m and run.copy else None
        bar(f"{label}, {most} sequences: share of the copy bandwidth", share, found, "{:.1%}")
    f16, q4_0 = (run.attention.get((label, most)) for label in ("f16", "q4_0"))
    found = f16.seconds / q4_0.seconds if f16 and q4_0 else None
    bar(f"q4_0 over f16, {most} sequences", FASTER, found, "{:.2f}")
    bar("SmolLM2, decoding from an empty cache, tokens/s", DECODING, run.decoding, "{:,.0f}")
    run.say(f"\n{time.monotonic() - run.started:.0f} s in all")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: see above")
    p.add_argument("--models", type=Path, help="folder of SmolLM2's GGUF file, if not pykv's own")
    p.add_argument("--out", type=Path, help="a file that gets the same lines")
    p.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds in all ({LIMIT_S})")
    p.add_argument("--no-tests", action="store_true", help="without tests/gpu")
    return p


def model_file(folder: Path | None) -> Path | None:
    """The model's file, or None where it is not."""
    path = (folder or hub.models_dir()) / hub.find(gpu_model.FILE).file
    return path if path.is_file() else None


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; 1 where something was found wrong."""
    args = parser().parse_args(argv)
    interpreted = args.device == "cpu"
    if interpreted != is_interpreted():
        sys.exit("--device cpu takes TRITON_INTERPRET=1, and a GPU takes none of it")
    if not interpreted and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; TRITON_INTERPRET=1 and --device cpu only try the script")
    if args.out:
        args.out.write_text("", encoding="utf-8")
    run = Run(torch.device(args.device), TINY if interpreted else Sizes(), args.limit, args.out)
    model = model_file(args.models)
    parts: list[tuple[str, Callable[[], None]]] = [
        ("facts", lambda: facts(run)),
        ("correctness", lambda: correctness(run, model, not args.no_tests)),
        ("copy", lambda: copying(run)),
        ("attention", lambda: attention(run)),
        ("model", lambda: whole_model(run, model)),
        ("bars", lambda: bars(run)),
    ]
    for name, part in parts:
        try:
            part()
        except Exception as error:  # whatever one part fails with, the next is run
            run.correct = False
            run.say(f"\n**{name} failed**: {type(error).__name__}: {_first_line(error)}")
    return 0 if run.correct else 1


if __name__ == "__main__":
    sys.exit(main())
