"""`pykv kv-report`: which cache types a model stands, by what they do to its attention."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykv.cli import _plot
from pykv.cli.options import ModelArgument, ModelOption, Output, read_bytes
from pykv.cli.render import Screen
from pykv.config import CacheConfig, LoadConfig
from pykv.errors import ConfigError

if TYPE_CHECKING:
    from pykv.engine.kv_report import Report
    from pykv.engine.model import Model
    from pykv.engine.spectrum import Spectrum

EXAMPLE = """\
pykv kv-report model.gguf -f book.txt
pykv kv-report model.gguf -f book.txt --types q8_0,q4_0,kivi4 --layers all
pykv kv-report -m model.gguf -f book.txt -c 4096 --plot report.png --json"""

LAYERS = ("all", "worst", "none")
_CTX_SIZE = 2048  # tokens a chunk
_WORST = 8  # heads that are shown by default
_CHANNELS = 6  # outlier channels of a head that are shown
_PARTS = (8, 4, 2)  # of a head's channels, an eighth, a quarter and half, whose energy is shown

_Types = Annotated[
    str | None,
    typer.Option(
        "--types", metavar="TYPE,...", help="Cache types.  Default: all that the model can use."
    ),
]
_Ratio = Annotated[
    float,
    typer.Option(
        "--outlier-ratio",
        metavar="X",
        help="A channel of K is an outlier above X times its head's median.",
    ),
]
_Plot = Annotated[
    str | None,
    typer.Option("--plot", metavar="FILE", help="Draw the errors and K: a png, pdf or svg."),
]


def command(
    model_option: ModelOption,
    load: LoadConfig,
    cache: CacheConfig,
    output: Output,
    model: ModelArgument = None,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", metavar="FILE", help="A text; - is standard input."),
    ] = None,
    types: _Types = None,
    chunks: Annotated[
        int, typer.Option("--chunks", metavar="N", help="Chunks to read; -1: all.")
    ] = 1,
    layers: Annotated[
        str, typer.Option("--layers", metavar="WHICH", help="Heads to show: all, worst or none.")
    ] = "worst",
    outlier_ratio: _Ratio = 5.0,
    plot: _Plot = None,
) -> None:
    """Show what each cache type does to a model's attention on a text.

    A text is read in chunks of -c tokens (default 2048).  For the queries of a chunk's last quarter
    it tells the error of each KV head's attention output, as a share of its norm, with keys, values
    or both as a type keeps them, which channels of K stand out, and for each layer the spectrum of
    K and V: the rank that keeps 99 % of their energy.  Each layer gets the inputs that it has in
    the model on the cache of -ctk and -ctv, a whole chunk at a time.
    """
    with Screen(output) as screen:
        if file is None:
            raise ConfigError("no text: name a file with -f, or - for standard input")
        chosen = _check(types, chunks, layers, outlier_ratio, plot, cache)
        text, ctx_size = read_bytes(file), load.ctx_size or _CTX_SIZE

        # in one batch each layer can be dealt with as soon as it was read
        # only the CPU backend can be listened to
        device = "cpu" if load.device == "auto" else load.device
        whole = replace(load, device=device, ctx_size=ctx_size, ubatch=ctx_size, batch=ctx_size)
        with screen.loaded(
            model_option.pick(model), offline=model_option.offline, load=whole, cache=cache
        ) as opened:
            some = None if chunks == -1 else chunks
            report = _measure(screen, opened, text, chosen, ctx_size, some, outlier_ratio)
        if output.json:
            screen.json(report.to_dict())
        else:
            _summary(screen, report)
            _heads(screen, report, layers)
            _spectra(screen, report, layers)
        if plot is not None:  # last: a picture that cannot be saved does not take the report along
            _draw(report, plot)


def _check(
    types: str | None,
    chunks: int,
    layers: str,
    outlier_ratio: float,
    plot: str | None,
    cache: CacheConfig,
) -> list[str] | None:
    """The types that were named.  Raises ConfigError for what can be known before the model is."""
    if chunks < 1 and chunks != -1:
        raise ConfigError(f"chunks must be 1 or more, or -1 for all, not {chunks}")
    if layers not in LAYERS:
        raise ConfigError(f"--layers '{layers}' is unknown: it is one of {', '.join(LAYERS)}")
    if not (math.isfinite(outlier_ratio) and outlier_ratio >= 1):
        raise ConfigError(f"--outlier-ratio must be 1 or more, not {outlier_ratio:g}")
    if plot is not None:
        _plot.check(plot)
    if types is None:
        return None
    names = [name.strip() for name in types.split(",")]
    if not all(names):
        raise ConfigError(f"--types must be cache types with commas between them, not '{types}'")

    from pykv.engine import kv_report

    kv_report.check_types(names, cache)
    return names


def _measure(
    screen: Screen,
    model: Model,
    text: bytes,
    types: list[str] | None,
    ctx_size: int,
    chunks: int | None,
    outlier_ratio: float,
) -> Report:
    from pykv.engine import kv_report

    with screen.running("layers") as tell:
        report = kv_report.measure(
            model,
            text,
            types,
            ctx_size=ctx_size,
            chunks=chunks,
            outlier_ratio=outlier_ratio,
            progress=lambda done, total, seconds: tell(done, total, f"{seconds:.2f} s a layer"),
        )
    if report.left_out:
        screen.note(f"left out: {', '.join(report.left_out)}; -v says why")
    for name, reason in report.left_out.items():
        screen.detail(f"{name}: {reason}")
    return report


def _summary(screen: Screen, report: Report) -> None:
    """A row for each type, over all heads."""
    first, plural = report.ctx_size - report.n_queries, "" if report.n_chunks == 1 else "s"
    screen.line(
        f"{report.n_chunks} chunk{plural} of {report.ctx_size:,} tokens, seen by queries {first:,} "
        f"to {report.ctx_size - 1:,}; {report.sinks} sinks"
    )
    screen.line(
        "Error of the attention output in % of its norm, keys and values encoded, or one of them; "
        "where: layer.head"
    )
    screen.line()
    row = screen.markdown(
        [
            ("type", max(len(t.name) for t in report.types), False),
            ("bits k", 0, True),
            ("bits v", 0, True),
            *((title, 7, True) for title in ("median", "95 %", "worst", "where")),
            *((title, 7, True) for title in ("k median", "k worst", "v median", "v worst")),
        ]
    )
    for t in report.types:
        both, keys, values = t.spread("both"), t.spread("keys"), t.spread("values")
        row(
            [
                t.name,
                f"{t.bits_k:.2f}",
                f"{t.bits_v:.2f}",
                *(_percent(x) for x in (both.median, both.p95, both.worst)),
                f"{both.layer}.{both.head}",
                *(_percent(x) for x in (keys.median, keys.worst, values.median, values.worst)),
            ]
        )


def _percent(share: float) -> str:
    """Three digits that count, of a share of 1."""
    percent = 100 * share
    digits = 3 if percent < 0.9995 else 2 if percent < 9.995 else 1 if percent < 99.95 else 0
    return f"{percent:.{digits}f}"


def _heads(screen: Screen, report: Report, layers: str) -> None:
    """A row for each head: the errors of all types, and outlier channels."""
    places = [(i, g) for i, shape in enumerate(report.shapes) for g in range(shape.n_kv)]
    shown = places if layers == "all" else report.worst(_WORST) if layers == "worst" else []
    found = {place: report.outliers(*place) for place in places}
    n, of = sum(map(len, found.values())), sum(s.n_kv * s.d_k for s in report.shapes)
    screen.line()
    screen.line(
        f"Outlier channels of K, above {report.outlier_ratio:g} times their head's median: {n:,} "
        f"of {of:,}, in {sum(map(bool, found.values())):,} of {len(places):,} heads"
    )
    if not shown:
        return
    screen.line()
    if layers == "worst":
        screen.line(f"The {len(shown)} heads that stand out most; --layers all shows every head")
        screen.line()
    row = screen.markdown(
        [
            ("layer", 0, True),
            ("head", 0, True),
            *((t.name, 5, True) for t in report.types),
            ("outlier channels of K", 0, False),
        ]
    )
    for layer, head in shown:
        errors = [float(t.errors["both"][layer][head]) for t in report.types]
        outliers = _channels(found[layer, head])
        row([str(layer), str(head), *map(_percent, errors), outliers])


def _channels(outliers: Sequence[tuple[int, float]]) -> str:
    """`12 (8.3x), 44 (5.1x)`: the largest, and how many more there are."""
    words = [f"{channel} ({ratio:.1f}x)" for channel, ratio in outliers[:_CHANNELS]]
    more = len(outliers) - _CHANNELS
    return ", ".join(words + ([f"{more} more"] if more > 0 else []))


def _spectra(screen: Screen, report: Report, layers: str) -> None:
    """Ranks that keep nearly all energy, over all heads, and a row for each layer."""
    from pykv.engine.spectrum import KEPT

    sides = list(zip(*report.spectra, strict=True))
    words = []
    for name, of_layers in zip("KV", sides, strict=True):
        ranks = [rank for spectrum in of_layers for rank in spectrum.ranks()]
        widths = sorted({spectrum.singular.shape[1] for spectrum in of_layers})
        of = " or ".join(map(str, widths))
        words.append(
            f"{name} {min(ranks)} to {max(ranks)}, median {statistics.median(ranks):g}, of {of}"
        )
    screen.line()
    screen.line(
        f"Rank that keeps {100 * KEPT:g} % of a head's energy, singular values squared: "
        + "; ".join(words)
    )
    if layers == "none":
        return
    screen.line()
    screen.line(
        "Each layer's heads: least and largest rank, and what the best 1/8, 1/4 and 1/2 of the "
        "channels keep, median in %"
    )
    screen.line()
    columns = [(f"{s} rank", 9, True) for s in "kv"]
    parts = [[(f"{s} 1/{part}", 5, True) for part in _PARTS] for s in "kv"]
    row = screen.markdown([("layer", 0, True), columns[0], *parts[0], columns[1], *parts[1]])
    for layer, pair in enumerate(report.spectra):
        row([str(layer), *(cell for spectrum in pair for cell in _spectrum(spectrum))])


def _spectrum(of: Spectrum) -> list[str]:
    """`20 to 31`, and how much some channels keep."""
    ranks, kept = of.ranks(), of.kept()
    low, high, d = min(ranks), max(ranks), kept.shape[1]
    middle = (statistics.median(kept[:, max(d // part, 1) - 1].tolist()) for part in _PARTS)
    return [
        str(low) if low == high else f"{low} to {high}",
        *(f"{100 * share:.1f}" for share in middle),
    ]


def _draw(report: Report, path: str) -> None:
    """Two heat maps: each type's worst head in each layer, and each layer's channels of K."""
    figure = _plot.figure(12, 4 + 0.25 * (len(report.types) + len(report.shapes)))
    colors: Any = importlib.import_module("matplotlib.colors")
    above, below = figure.subplots(2, 1)
    worst = [[100 * float(e.max()) for e in t.errors["both"]] for t in report.types]
    keys = [[float(m) for m in of.reshape(-1)] for of in report.magnitudes]
    longest = max(map(len, keys))
    keys = [row + [math.nan] * (longest - len(row)) for row in keys]
    for axes, rows, title, xlabel, label in (
        (above, worst, "Worst head of each layer", "layer", "error of the attention output, %"),
        (below, keys, "Largest keys", "KV head and channel", "largest |K|"),
    ):
        image = axes.imshow(rows, aspect="auto", norm=_norm(colors, rows), interpolation="nearest")
        axes.set(title=title, xlabel=xlabel)
        figure.colorbar(image, ax=axes, label=label)
    above.set_yticks(range(len(report.types)), labels=[t.name for t in report.types])
    below.set(ylabel="layer")
    _plot.save(figure, path)


def _norm(colors: Any, rows: Sequence[Sequence[float]]) -> Any:
    """Logarithmic colours over what is above zero, at most five decades of it."""
    positive = [x for row in rows for x in row if x > 0]  # not NaN either
    most = max(positive, default=1.0)
    return colors.LogNorm(max(min(positive, default=1.0), most / 1e5), most, clip=True)
