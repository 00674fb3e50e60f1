import json
import math

import pytest

from pykv.cli import app
from pykv.cli.options import spelled
from pykv.config import CacheConfig
from pykv.engine import needle
from pykv.engine.needle import Score
from pykv.errors import ConfigError

Q4 = "-ctk q4_0 -ctv q4_0"
FOUND = {  # length, depth: exact and log-probability
    (512, 0): (True, -0.25), (512, 50): (True, -0.5),
    (1024, 0): (False, -2.0), (1024, 50): (True, -1.25),
}  # fmt: skip


@pytest.fixture
def measured(monkeypatch, engine):
    """Scores that are known in the place of measured ones; the list holds what was asked for."""
    asked = []

    def tasks(model, lengths, depths, needles, text, seed):
        asked.append((lengths, depths, needles, text, seed))
        return [(n, d) for n in lengths for d in depths]

    def scores(model, tasks, cache, compress):
        asked.append((cache, compress))
        good = cache == CacheConfig()
        for n, d in tasks:
            if cache.sinks == 9 and n == 1024:
                raise KeyboardInterrupt
            exact, log_prob = FOUND.get((n, d), (True, -1.0))
            if not good:
                exact, log_prob = False, log_prob * 10
            yield Score(n, d, exact, log_prob, n * (1050 if good else 300), n * 1000, 1.5)

    monkeypatch.setattr(needle, "tasks", tasks)
    monkeypatch.setattr(needle, "scores", scores)
    monkeypatch.setattr(needle, "settled", lambda model, caches: caches)
    return asked


GRID = ("needle", "--lengths", "1024,512", "--depths", "50,0")


def test_the_tables(pykv, measured):
    result = pykv(*GRID, "--setting", Q4)
    assert (result.code, result.out.splitlines()) == (0, [
        "f16: exact answers, and mean log-probability of an answer's tokens",
        "",
        "|  depth |          512 |        1,024 |",
        "| -----: | -----------: | -----------: |",
        "|    0 % | 100 %  -0.25 |   0 %  -2.00 |",
        "|   50 % | 100 %  -0.50 | 100 %  -1.25 |",
        "",
        "-ctk q4_0 -ctv q4_0: exact answers, and mean log-probability of an answer's tokens",
        "",
        "|  depth |          512 |        1,024 |",
        "| -----: | -----------: | -----------: |",
        "|    0 % |   0 %  -2.50 |   0 % -20.00 |",
        "|   50 % |   0 %  -5.00 |   0 % -12.50 |",
        "",
        "| cache               | needles | exact | log-prob |     MiB |  of f16 |",
        "| ------------------- | ------: | ----: | -------: | ------: | ------: |",
        "| f16                 |       4 |  75 % |   -1.000 |    1.03 | 105.0 % |",
        "| -ctk q4_0 -ctv q4_0 |       4 |   0 % |  -10.000 |    0.29 |  30.0 % |",
    ])  # fmt: skip
    assert "[3/4] f16: 1,024 tokens, 0 %: missed, -2.000; 1.5 s\n" in result.err
    assert pykv(*GRID, "-q").err == ""


def test_what_the_engine_gets(pykv, measured, tmp_path):
    loaded = pykv("needle", "m.gguf").calls[-1]
    assert (loaded["model"], loaded["load"].ctx_size) == ("m.gguf", 2048)
    assert measured == [
        ([512, 1024, 2048], [0, 25, 50, 75, 100], 1, None, 0), (CacheConfig(), "after-question"),
    ]  # fmt: skip
    text = tmp_path / "text.txt"
    text.write_bytes(b"One. Two.\xff\n")
    del measured[:]
    args = ("-f", text, "--needles", "3", "-s", "7", "--compress", "before-question", "-c", "4096")
    result = pykv(*GRID, *args)
    assert measured == [
        ([512, 1024], [0, 50], 3, "One. Two.\ufffd", 7), (CacheConfig(), "before-question"),
    ]  # fmt: skip
    assert result.calls[-1]["load"].ctx_size == 4096
    assert "the input is not all UTF-8" in result.err


def test_which_caches_are_tried(pykv, measured):
    def tried(*args):
        del measured[:]
        result = pykv(*GRID, *args)
        assert result.code == 0, result.err
        # the first is what the model is loaded with
        assert result.calls[-1]["cache"] == measured[1][0]
        return [cache for cache, _ in measured[1:]]

    q8, q4 = CacheConfig(type_k="q8_0"), CacheConfig(type_k="q4_0", type_v="q4_0")
    assert tried() == [CacheConfig()]
    assert tried("--no-baseline") == [CacheConfig()]
    assert tried("-ctk", "q8_0") == [CacheConfig(), q8]
    assert tried("-ctk", "q8_0", "--setting", Q4, "--setting", "--cache_type_k=q8_0") == [
        CacheConfig(), q8, q4,
    ]  # fmt: skip
    assert tried("--no-baseline", "--setting", Q4) == [q4]


def test_a_setting_takes_every_flag_of_the_cache():
    line = "--cache-type-k q8_0 --kv-residual 0 --cache-type-override '0-1=k:f16'"
    cache = CacheConfig(type_k="q8_0", residual=0, override="0-1=k:f16")
    assert app.cache_setting(line) == cache
    # and what is spelled means the same
    assert spelled(cache) == "-ctk q8_0 --kv-residual 0 --cache-type-override 0-1=k:f16"
    assert app.cache_setting(spelled(cache)) == cache
    odd = CacheConfig(type_v="two words", sinks=0)
    assert app.cache_setting(spelled(odd)) == odd
    assert (spelled(CacheConfig()), app.cache_setting("")) == ("", CacheConfig())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-ctk", "setting '-ctk': Option '-ctk' requires an argument; it takes the flags of the"),
        ("--temp 1", "setting '--temp 1': No such option: --temp"),
        ("-h", "setting '-h': No such option: -h"),
        ("q4_0", r"setting 'q4_0': Got unexpected extra argument.*\(q4_0\)"),
        ("--kv-sinks x", "Invalid value for '--kv-sinks': 'x' is not a whole number"),
        ("-ctk 'q4_0", "setting '-ctk 'q4_0': No closing quotation"),
        ("--kv-sinks 99", "kv sinks must be 0 to 64 tokens, not 99"),
    ],
)
def test_a_setting_that_is_none(line, said):
    with pytest.raises(ConfigError, match=said):
        app.cache_setting(line)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--lengths", "512,x"], "--lengths must be whole numbers with commas between them"),
        (["--lengths", "512.5"], "whole numbers with commas between them, not '512.5'"),
        (["--lengths", "9"], "a length must be 64 tokens or more, not 9"),
        (["--depths", "0,,5"], "--depths must be numbers with commas between them, not '0,,5'"),
        (["--depths", "101"], "a depth must be 0 to 100 percent of the text, not 101"),
        (["--needles", "0"], "there must be 1 needle or more in each cell, not 0"),
        (["--compress", "x"], "--compress 'x' is unknown: it is after-question or before-question"),
        (["-c", "1024"], "a length of 2,048 tokens does not fit a context of 1,024: raise -c"),
        (["--setting", "-ctk q4"], "unknown cache type 'q4': it is one of bf16"),
        (["--setting", "-x"], "setting '-x': No such option: -x"),
        (["--plot", "x.jpeg"], "the file's name must end in .png, .pdf, .svg"),
        (["--plot", "none/x.png"], "there is no such folder, create it first"),
    ],
)
def test_what_makes_no_sense_ends_it_before_the_model_is_loaded(pykv, measured, args, said):
    result = pykv("needle", *args)
    assert (result.code, result.out, result.calls) == (2, "", [])
    assert said in result.err
    assert result.err.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_told_before_the_run(pykv, measured, tmp_path):
    (tmp_path / "x.png").mkdir()
    result = pykv("needle", "--plot", tmp_path / "x.png")
    assert (result.code, result.calls) == (2, [])
    assert result.err.endswith("this is a folder, name a file\n")


def test_json_holds_everything(pykv, measured):
    result = pykv(*GRID, "--setting", Q4, "--json")
    found = json.loads(result.out)
    assert (found["lengths"], found["depths"], found["compress"]) == (
        [512, 1024], [0, 50], "after-question",
    )  # fmt: skip
    assert [s["setting"] for s in found["settings"]] == ["f16", Q4]
    assert found["settings"][1]["cache"]["type_v"] == "q4_0"
    assert (found["settings"][0]["exact"], found["settings"][0]["log_prob"]) == (0.75, -1)
    assert [n["log_prob"] for n in found["settings"][0]["needles"]] == [-0.25, -0.5, -2, -1.25]


def test_ctrl_c_shows_what_was_finished(pykv, measured):
    result = pykv(*GRID, "--setting", "--kv-sinks 9", "--setting", Q4)
    assert result.code == 130
    lines = result.out.splitlines()
    assert lines[7:13] == [
        "--kv-sinks 9: exact answers, and mean log-probability of an answer's tokens",
        "",
        "|  depth |          512 |        1,024 |",
        "| -----: | -----------: | -----------: |",
        "|    0 % |   0 %  -2.50 |              |",
        "|   50 % |   0 %  -5.00 |              |",
    ]
    assert [line.split("|")[1:3] for line in lines[-2:]] == [
        [" f16          ", "       4 "], [" --kv-sinks 9 ", "       2 "],
    ]  # fmt: skip
    result = pykv(*GRID, "--setting", "--kv-sinks 9", "--json")
    assert [len(s["needles"]) for s in json.loads(result.out)["settings"]] == [4, 2]


def test_cells_have_a_colour_on_a_terminal_only(pykv, measured, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain = pykv(*GRID).out
    shown = pykv(*GRID, tty=True).out
    assert "\x1b" not in plain
    assert shown.count("\x1b[32m") == 3  # green: exact
    assert shown.count("\x1b[31m") == 1  # red: missed
    assert shown.count("\x1b[33m") == 1  # yellow: between, in the summary
    for code in ("[32m", "[31m", "[33m", "[0m"):
        shown = shown.replace(f"\x1b{code}", "")
    assert shown == plain


class Axes:
    """Notes down what is drawn."""

    def __init__(self):
        self.words, self.said, self.visible = {}, {}, True

    def imshow(self, rows, **how):
        self.rows = rows
        return self

    def set_title(self, title, **how):
        self.title = title

    def set_visible(self, visible):
        self.visible = visible

    def set(self, **words):
        self.said |= words

    def set_xticks(self, ticks, labels):
        self.x = labels

    def set_yticks(self, ticks, labels):
        self.y = labels

    def text(self, x, y, words, **how):
        self.words[x, y] = words


class Figure:
    """Stands in for matplotlib's."""

    def __init__(self):
        self.bars = []

    def subplots(self, down, across, squeeze):
        self.axes, self.shape = [Axes() for _ in range(down * across)], (down, across)
        return self

    def reshape(self, n):
        return self.axes

    def colorbar(self, image, *, ax, label):
        self.bars.append(label)


@pytest.fixture
def figure(monkeypatch):
    """What is drawn, and the paths that it is saved to."""
    from pykv.cli import _plot

    made, paths = Figure(), []
    monkeypatch.setattr(_plot, "check", lambda path: None)
    monkeypatch.setattr(_plot, "figure", lambda width, height: made)
    monkeypatch.setattr(_plot, "save", lambda drawn, path: paths.append(path))
    made.paths = paths
    return made


def test_the_picture(pykv, measured, figure):
    lines = [word for k in ("q8_0", "q4_0", "q5_0") for word in ("--setting", f"-ctk {k}")]
    result = pykv(*GRID, *lines, "--picture", "x.png")
    assert (result.code, figure.paths, figure.shape) == (0, ["x.png"], (2, 3))
    assert [a.visible for a in figure.axes] == [True] * 4 + [False] * 2
    first = figure.axes[0]
    assert (first.title, first.x, first.y) == ("f16", ["512", "1024"], ["0", "50"])
    # a row for each depth, a column for each length
    assert first.rows == [[math.exp(-0.25), math.exp(-2)], [math.exp(-0.5), math.exp(-1.25)]]
    assert first.words == {
        (0, 0): "100 %\n-0.25", (1, 0): "0 %\n-2.00", (0, 1): "100 %\n-0.50",
        (1, 1): "100 %\n-1.25",
    }  # fmt: skip
    assert len(figure.bars) == 1


def test_the_picture_of_a_run_that_was_interrupted(pykv, measured, figure):
    assert pykv(*GRID, "--setting", "--kv-sinks 9", "--plot", "x.svg").code == 130
    assert figure.paths == ["x.svg"]
    assert [math.isnan(row[1]) for row in figure.axes[1].rows] == [True, True]
    assert set(figure.axes[1].words) == {(0, 0), (0, 1)}


def test_a_real_picture(pykv, measured, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    for suffix, begins in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        path = tmp_path / f"needle{suffix}"
        result = pykv(*GRID, "--setting", Q4, "--setting", "--kv-sinks 8", "--plot", path)
        assert (result.code, path.read_bytes().startswith(begins)) == (0, True), result.err


def test_on_the_real_engine(capsys, small, tmp_path):
    model = small.write_model(tmp_path / "small.gguf", n_ctx=1024)
    code = app.run([
        "needle", str(model), "--lengths", "320,640", "--depths", "0,100", "-t", "1",
        "--setting", "-ctk kivi2 -ctv kivi2 --kv-residual 0 --kv-guard off",
    ])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    lines = out.splitlines()
    rows = [line.split("|") for line in lines[-2:]]
    assert [int(row[2]) for row in rows] == [4, 4]
    assert float(rows[0][6].rstrip(" %")) > 100 > float(rows[1][6].rstrip(" %"))
    assert err.count("tokens, ") == 8
