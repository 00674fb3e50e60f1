"""`pykv perplexity`: how well a model predicts a text, and how far its cache moves predictions."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykv.cli.options import ModelOption, Output, read_bytes
from pykv.cli.render import Screen
from pykv.config import CacheConfig, LoadConfig
from pykv.errors import ConfigError

if TYPE_CHECKING:
    from pykv.engine.divergence import Divergence, Estimate
    from pykv.engine.logits_file import LogitsReader, LogitsWriter
    from pykv.engine.model import Model, Perplexity

EXAMPLE = """\
pykv perplexity wiki.test.txt --chunks 16
pykv perplexity -f wiki.test.txt -m model.gguf -c 2048 -ctk f32 -ctv f32 --json
pykv perplexity wiki.test.txt --chunks 16 --kl-divergence -ctk q8_0 -ctv q4_0
pykv perplexity wiki.test.txt --save-all-logits f16.kld
pykv perplexity --kl-divergence --kl-divergence-base f16.kld -ctk q8_0 -ctv q4_0"""

_CTX_SIZE = 512  # tokens a chunk, llama-perplexity's default
_LEAST_FOR_STATISTICS = 100  # tokens, as there
_WORDS: dict[float, str] = {100: "Maximum", 50: "Median", 0: "Minimum"}

_Kl = Annotated[
    bool, typer.Option("--kl-divergence", help="Compare with an f16 cache that runs beside.")
]
_Base = Annotated[
    str | None,
    typer.Option(
        "--kl-divergence-base",
        metavar="FILE",
        help="Compare with a file of logits instead, on its text.",
    ),
]
_Save = Annotated[
    str | None,
    typer.Option(
        "--save-all-logits",
        metavar="FILE",
        help="Write all logits, as llama-perplexity does; 2 bytes each.",
    ),
]


def command(
    model_option: ModelOption,
    load: LoadConfig,
    cache: CacheConfig,
    output: Output,
    corpus: Annotated[
        str | None, typer.Argument(metavar="CORPUS", help="A text file; - is standard input.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="The same as CORPUS.")
    ] = None,
    chunks: Annotated[
        int, typer.Option("--chunks", metavar="N", help="Chunks to read; -1: all.")
    ] = -1,
    kl_divergence: _Kl = False,
    kl_divergence_base: _Base = None,
    save_all_logits: _Save = None,
) -> None:
    """Measure a model's perplexity on a text, as llama-perplexity does.

    The text is cut into chunks of -c tokens (default 512), and the second half of each is scored.
    --kl-divergence tells how far predictions are from those of a 16-bit cache.
    """
    with Screen(output) as screen, ExitStack() as stack:
        name = _text_name(corpus, file)
        _check(chunks, kl_divergence, kl_divergence_base, save_all_logits)
        base = None if kl_divergence_base is None else stack.enter_context(
            _open_base(screen, kl_divergence_base, name)
        )  # fmt: skip
        if base is None and name is None:
            raise ConfigError("no text: name a file, or - for standard input")
        text = read_bytes(name) if base is None and name is not None else None
        save = None if save_all_logits is None else stack.enter_context(
            _open_save(screen, save_all_logits)
        )  # fmt: skip
        # a file of logits has chunks of its own; -c may give the context more room than they need
        ctx_size = load.ctx_size or (_CTX_SIZE if base is None else base.extent.n_ctx)
        opened = stack.enter_context(
            screen.loaded(
                model_option.pick(),
                offline=model_option.offline,
                load=replace(load, ctx_size=ctx_size),
                cache=cache,
            )
        )
        some = None if chunks == -1 else chunks
        if kl_divergence:
            _diverge(screen, opened, text, base, ctx_size, some)
        else:
            _measure(screen, opened, text or b"", ctx_size, some, save)


def _text_name(corpus: str | None, file: str | None) -> str | None:
    if corpus is not None and file is not None and corpus != file:
        raise ConfigError(f"two texts were named, {corpus} and {file}: give one")
    return corpus if corpus is not None else file


def _check(chunks: int, kl: bool, base: str | None, save: str | None) -> None:
    if chunks < 1 and chunks != -1:
        raise ConfigError(f"chunks must be 1 or more, or -1 for all, not {chunks}")
    if base is not None and not kl:
        raise ConfigError(
            "--kl-divergence-base is what --kl-divergence compares with: give both, or write such "
            "a file with --save-all-logits"
        )
    if save is not None and kl:
        raise ConfigError(
            "--save-all-logits writes what a run without --kl-divergence predicts: give one"
        )


def _open_base(screen: Screen, path: str, name: str | None) -> LogitsReader:
    from pykv.engine.logits_file import LogitsReader

    reader = LogitsReader(path)
    if name is not None:
        screen.note(f"the text is the one that {path} was written from; {name} is not read")
    return reader


def _open_save(screen: Screen, path: str) -> LogitsWriter:
    from pykv.engine.logits_file import LogitsWriter

    return LogitsWriter(
        path, lambda n: screen.note(f"{path} will take {n:,} bytes ({n / 1e9:.2f} GB)")
    )


def _measure(
    screen: Screen,
    model: Model,
    text: bytes,
    ctx_size: int,
    chunks: int | None,
    save: LogitsWriter | None,
) -> None:
    run = model.perplexity if save is None else partial(model.perplexity, save_logits=save)
    with screen.running("perplexity") as tell:
        result = run(
            text,
            ctx_size=ctx_size,
            chunks=chunks,
            progress=lambda done, total, estimate, seconds: tell(
                done, total, f"PPL {estimate:.4f}, {seconds:.2f} s a chunk"
            ),
        )
    _report(screen, result, model.path, ctx_size)


def _report(screen: Screen, result: Perplexity, model: Path, ctx_size: int) -> None:
    if screen.output.json:
        screen.json(
            {
                "model": str(model),
                "perplexity": result.value,
                "error": result.error,
                "ctx_size": ctx_size,
                "chunks": result.n_chunks,
                "tokens": result.n_tokens,
                "chunk_values": [float(v) for v in result.chunk_values],
            }
        )
    else:
        screen.line(f"Final estimate: PPL = {result.value:.4f} +/- {result.error:.5f}")


def _diverge(
    screen: Screen,
    model: Model,
    text: bytes | None,
    base: LogitsReader | None,
    ctx_size: int,
    chunks: int | None,
) -> None:
    so_far: list[dict[str, float]] = []

    def tell(done: int, total: int, now: Divergence, seconds: float) -> None:
        # a line each, on a terminal too: they are figures to be read, and too long for a bar
        screen.note(f"[{done}/{total}] {_running(now)}, {seconds:.2f} s a chunk")
        so_far.append(
            {
                "perplexity": now.perplexity.value,
                "log_ratio": now.log_ratio.value,
                "kld": now.kld.value,
                "rms_dp": now.rms_dp.value,
                "same_top": now.same_top.value,
            }
        )

    result = model.divergence(text, base=base, ctx_size=ctx_size, chunks=chunks, progress=tell)
    if screen.output.json:
        n_ctx = ctx_size if base is None else base.extent.n_ctx
        about = {"model": str(model.path), "ctx_size": n_ctx}
        screen.json(about | result.to_dict() | {"running": so_far})
    elif result.n_tokens < _LEAST_FOR_STATISTICS:
        screen.line(_running(result))
        screen.note(
            f"{result.n_tokens} tokens were scored; from {_LEAST_FOR_STATISTICS} on, all "
            "statistics are shown"
        )
    else:
        _statistics(screen, result)


def _running(now: Divergence) -> str:
    """The figures that llama-perplexity shows after each chunk; all tokens so far."""
    return (
        f"PPL {now.perplexity.value:.4f} +/- {now.perplexity.error:.4f}, "
        f"ln ratio {now.log_ratio.value:.5f} +/- {now.log_ratio.error:.5f}, "
        f"KLD {now.kld.value:.6f} +/- {now.kld.error:.6f}, "
        f"RMS Δp {100 * now.rms_dp.value:.3f} +/- {100 * now.rms_dp.error:.3f} %, "
        f"same top p {100 * now.same_top.value:.3f} +/- {100 * now.same_top.error:.3f} %"
    )


def _statistics(screen: Screen, result: Divergence) -> None:
    """All figures, under llama-perplexity's names."""
    screen.line("Perplexity statistics")
    _line(screen, "Mean PPL(Q)", result.perplexity)
    _line(screen, "Mean PPL(base)", result.base_perplexity)
    correlation = "none" if result.correlation is None else f"{100 * result.correlation:10.4f} %"
    screen.line(f"{'Cor(ln(PPL(Q)), ln(PPL(base)))':<31}: {correlation}")
    _line(screen, "Mean ln(PPL(Q)/PPL(base))", result.log_ratio)
    _line(screen, "Mean PPL(Q)/PPL(base)", result.ratio)
    _line(screen, "Mean PPL(Q)-PPL(base)", result.difference)
    screen.line("\nKL divergence statistics, in nats")
    _line(screen, "Mean KLD", result.kld)
    for percent, value in result.kld_percentiles.items():
        screen.line(f"{_percentile(percent) + ' KLD':<31}: {value:10.6f}")
    screen.line("\nToken probability statistics")
    _line(screen, "Mean Δp", result.dp, share=True)
    for percent, value in result.dp_percentiles.items():
        screen.line(f"{_percentile(percent) + ' Δp':<31}: {100 * value:10.4f} %")
    _line(screen, "RMS Δp", result.rms_dp, share=True)
    _line(screen, "Same top p", result.same_top, share=True)


def _line(screen: Screen, name: str, what: Estimate, share: bool = False) -> None:
    if share:
        figures = f"{100 * what.value:10.4f} +/- {100 * what.error:8.4f} %"
    else:
        figures = f"{what.value:10.6f} +/- {what.error:8.6f}"
    screen.line(f"{name:<31}: {figures}")


def _percentile(percent: float) -> str:
    return _WORDS.get(percent, f"{percent:.1f} %")
