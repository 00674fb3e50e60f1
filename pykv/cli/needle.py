"""`pykv needle`: whether a cache still gives back a fact that was hidden in a long text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from pykv.cli import _plot
from pykv.cli.app import cache_setting
from pykv.cli.options import ModelArgument, ModelOption, Output, decoded, read_bytes, spelled
from pykv.cli.render import Screen
from pykv.config import CacheConfig, LoadConfig
from pykv.errors import ConfigError

if TYPE_CHECKING:
    from pykv.engine.model import Model
    from pykv.engine.needle import Grid, Score

EXAMPLE = """\
pykv needle model.gguf --setting "-ctk q4_0 -ctv q4_0" --setting "-ctk kivi2 -ctv kivi2"
pykv needle -m model.gguf -f book.txt --lengths 4096,8192 --depths 10,50,90 --needles 3
pykv needle model.gguf -ctk q8_0 -ctv q4_0 --plot needle.png --json"""

_ACROSS = 3  # maps side by side in a picture
_BASELINE = "f16"

_Lengths = Annotated[
    str, typer.Option("--lengths", metavar="N,...", help="Tokens of the text and its question.")
]
_Depths = Annotated[
    str, typer.Option("--depths", metavar="P,...", help="Where the fact is, in % of the text.")
]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="FLAGS",
        help="Flags of one more cache, as in '-ctk q4_0 -ctv q4_0'; may be repeated.",
    ),
]
_File = Annotated[
    str | None,
    typer.Option(
        "-f",
        "--file",
        "--text",
        metavar="FILE",
        help="A text to hide the fact in; - is standard input.  Default: made-up sentences.",
    ),
]
_Needles = Annotated[
    int, typer.Option("--needles", metavar="N", help="Facts for each length and depth, one a run.")
]
_Compress = Annotated[
    str,
    typer.Option(
        "--compress",
        metavar="WHEN",
        help="When a policy takes the prompt for ended: after-question or before-question.",
    ),
]
_Plot = Annotated[
    str | None,
    typer.Option("--plot", "--picture", metavar="FILE", help="Draw the grids: a png, pdf or svg."),
]


def command(
    model_option: ModelOption,
    load: LoadConfig,
    cache: CacheConfig,
    output: Output,
    model: ModelArgument = None,
    lengths: _Lengths = "512,1024,2048",
    depths: _Depths = "0,25,50,75,100",
    setting: _Settings = None,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="An f16 cache too: on by default.")
    ] = True,
    file: _File = None,
    needles: _Needles = 1,
    seed: Annotated[
        int, typer.Option("-s", "--seed", metavar="N", help="Seed of names, numbers and text.")
    ] = 0,
    compress: _Compress = "after-question",
    plot: _Plot = None,
) -> None:
    """Show whether a cache gives back a fact that is hidden in a long text.

    A sentence with a random number is hidden at each depth of a text of each length, and asked for
    at its end.  A cell tells how many answers were exact, and the mean log-probability (nats) of an
    answer's tokens, 0 being certainty.  All caches are asked the same: f16, that of the flags
    below, and one for each --setting.
    """
    with Screen(output) as screen:
        sizes = [int(n) for n in _numbers(lengths, "--lengths", whole=True)]
        grid = Plan(sizes, _numbers(depths, "--depths"), needles, seed, compress)
        caches = _caches(cache, setting or [], baseline)
        _check(grid, load, plot, caches)
        text = None if file is None else _text(screen, file)
        wide = replace(load, ctx_size=load.ctx_size or max(sizes))
        with screen.loaded(
            model_option.pick(model),
            offline=model_option.offline,
            load=wide,
            cache=next(iter(caches.values())),
        ) as opened:
            _run(screen, opened, grid, caches, text, plot)


@dataclass(frozen=True)
class Plan:
    """What is asked of every cache."""

    lengths: Sequence[int]
    depths: Sequence[float]
    needles: int
    seed: int
    compress: str


def _numbers(text: str, flag: str, whole: bool = False) -> list[float]:
    """Numbers with commas between them, in order, each once."""
    try:
        return sorted({int(word) if whole else float(word) for word in text.split(",")})
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"{flag} must be {kind} with commas between them, not '{text}'") from None


def _caches(cache: CacheConfig, settings: Sequence[str], baseline: bool) -> dict[str, CacheConfig]:
    """All caches to try, each once, by name."""
    tried = [CacheConfig()] if baseline else []
    if cache != CacheConfig() or (not baseline and not settings):
        tried.append(cache)
    tried += [cache_setting(line) for line in settings]
    return {spelled(each) or _BASELINE: each for each in tried}


def _check(plan: Plan, load: LoadConfig, plot: str | None, caches: dict[str, CacheConfig]) -> None:
    """Raise ConfigError for what can be known before the model is."""
    from pykv.engine import needle

    needle.check(plan.lengths, plan.depths, plan.needles, plan.compress, caches.values())
    if 0 < load.ctx_size < max(plan.lengths):
        raise ConfigError(
            f"a length of {max(plan.lengths):,} tokens does not fit a context of "
            f"{load.ctx_size:,}: raise -c, or leave it out"
        )
    if plot is not None:
        _plot.check(plot)


def _text(screen: Screen, file: str) -> str:
    text, n_bad = decoded(read_bytes(file))
    screen.warn_bad_bytes(n_bad)
    return text


def _run(
    screen: Screen,
    model: Model,
    plan: Plan,
    caches: dict[str, CacheConfig],
    text: str | None,
    plot: str | None,
) -> None:
    """Ask all caches and show what came of it; after Ctrl-C too, since it was measured."""
    from pykv.engine import needle

    asked = needle.tasks(model, plan.lengths, plan.depths, plan.needles, text, plan.seed)
    settled = needle.settled(model, list(caches.values()))
    grids: list[Grid] = []
    try:
        for name, cache in zip(caches, settled, strict=True):
            scores: list[Score] = []
            grid = needle.Grid(name, cache, scores)
            try:
                with screen.running("needles") as tell:
                    for score in needle.scores(model, asked, cache, plan.compress):
                        if not scores:
                            grids.append(grid)
                        scores.append(score)
                        tell(len(scores), len(asked), _figures(name, score))
            finally:
                if scores and not screen.output.json:
                    _grid(screen, grid, plan)
    finally:
        if screen.output.json:
            about = {"model": str(model.path), **asdict(plan), "text": text is not None}
            screen.json(about | {"settings": [grid.to_dict() for grid in grids]})
        elif grids:
            _summary(screen, grids)
        if plot is not None and grids:  # last: what cannot be saved does not take the rest along
            _draw(grids, plan, plot)


def _figures(name: str, score: Score) -> str:
    return (
        f"{name}: {score.length:,} tokens, {score.depth:g} %: "
        f"{'exact' if score.exact else 'missed'}, {score.log_prob:.3f}; {score.seconds:.1f} s"
    )


def _grid(screen: Screen, grid: Grid, plan: Plan) -> None:
    """A row for each depth, a column for each length."""
    screen.line(f"{grid.name}: exact answers, and mean log-probability of an answer's tokens")
    screen.line()
    width = len("100 % -10.00")
    row = screen.markdown(
        [("depth", 6, True), *((f"{length:,}", width, True) for length in plan.lengths)]
    )
    for depth in plan.depths:
        cells = [grid.cell(length, depth) for length in plan.lengths]
        words = ["" if c is None else f"{100 * c.exact:.0f} % {c.log_prob:6.2f}" for c in cells]
        row([f"{depth:g} %", *words], ["", *("" if c is None else _colour(c.exact) for c in cells)])
    screen.line()


def _colour(share: float) -> str:
    return "green" if share == 1 else "red" if share == 0 else "yellow"


def _summary(screen: Screen, grids: Sequence[Grid]) -> None:
    """A row for each cache."""
    row = screen.markdown(
        [
            ("cache", max(len(grid.name) for grid in grids), False),
            ("needles", 0, True),
            ("exact", 5, True),
            ("log-prob", 8, True),
            ("MiB", 7, True),
            ("of f16", 7, True),
        ]
    )
    for grid in grids:
        total, largest = grid.total, grid.largest
        if total is None or largest is None:
            continue
        row(
            [
                grid.name,
                str(total.n),
                f"{100 * total.exact:.0f} %",
                f"{total.log_prob:.3f}",
                f"{largest.cache_bytes / 2**20:.2f}",
                f"{100 * largest.cache_bytes / largest.f16_bytes:.1f} %",
            ],
            ["", "", _colour(total.exact), "", "", ""],
        )


def _draw(grids: Sequence[Grid], plan: Plan, path: str) -> None:
    """A map for each cache: the colour is the answer's probability a token, the words as above."""
    across = min(len(grids), _ACROSS)
    down = -(-len(grids) // across)
    width, height = 1.6 + 0.9 * len(plan.lengths), 1.4 + 0.45 * len(plan.depths)
    figure = _plot.figure(across * width + 1, down * height)
    axes = figure.subplots(down, across, squeeze=False).reshape(-1)
    for place in axes[len(grids) :]:
        place.set_visible(False)
    for place, grid in zip(axes, grids, strict=False):
        cells = [[grid.cell(length, depth) for length in plan.lengths] for depth in plan.depths]
        shares = [[math.nan if c is None else math.exp(c.log_prob) for c in r] for r in cells]
        image = place.imshow(shares, aspect="auto", vmin=0, vmax=1, cmap="RdYlGn")
        place.set_title(grid.name, fontsize=8)
        place.set(xlabel="tokens", ylabel="depth, %")
        place.set_xticks(range(len(plan.lengths)), labels=[str(n) for n in plan.lengths])
        place.set_yticks(range(len(plan.depths)), labels=[f"{depth:g}" for depth in plan.depths])
        for y, in_row in enumerate(cells):
            for x, cell in enumerate(in_row):
                if cell is not None:
                    words = f"{100 * cell.exact:.0f} %\n{cell.log_prob:.2f}"
                    place.text(x, y, words, ha="center", va="center", fontsize=7)
    figure.colorbar(image, ax=list(axes), label="probability of an answer's token, geometric mean")
    _plot.save(figure, path)
