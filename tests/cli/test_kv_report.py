import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from pykv.backends.base import LayerShape
from pykv.cache.layout import layouts_of
from pykv.config import CacheConfig
from pykv.engine import kv_report
from pykv.engine.kv_report import Report, TypeErrors
from pykv.engine.spectrum import Spectrum

SHAPES = [LayerShape(2, 2, 32, 32), LayerShape(1, 1, 32, 32)]
ERRORS = {  # of the heads 0.0, 0.1 and 1.0: keys, values, both
    "q8_0": [(0.004, 0.006, 0.005), (0.001, 0.002, 0.003), (0.005, 0.007, 0.006)],
    "kivi2": [(0.1, 0.2, 1.5), (0.02, 0.04, 0.03), (0.12, 0.25, 1.6)],
}


def spectrum(*ranks):
    """Of heads of width 32, each with as many equal singular values."""
    return Spectrum(np.array([[2.0] * rank + [0] * (32 - rank) for rank in ranks]))


def a_report():
    types = []
    for name, parts in ERRORS.items():
        layouts = layouts_of(CacheConfig(type_k=name, type_v=name), SHAPES)
        of = {
            part: [np.array(e[:2]), np.array(e[2:])]
            for part, e in zip(("keys", "values", "both"), parts, strict=True)
        }
        types.append(TypeErrors(name, 8.5, 3.0, layouts, of))
    magnitudes = [np.ones((s.n_kv, s.d_k), np.float32) for s in SHAPES]
    magnitudes[1][0, 5], magnitudes[1][0, 20] = 6.25, 8
    spectra = [(spectrum(10, 16), spectrum(32, 32)), (spectrum(5), spectrum(2))]
    left_out = {"nuq3": "cache type nuq3 needs numbers"}
    return Report(
        Path("default.gguf"), 2048, 1, 512, 4, 5.0, SHAPES, magnitudes, spectra, types, left_out
    )  # fmt: skip


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"one two\xff three\n\n")
    return file


@pytest.fixture
def measured(monkeypatch):
    """A report that is known in the place of a measured one; the list holds what was asked for."""
    asked = []

    def measure(model, text, types=None, *, progress, **how):
        asked.append({"text": text, "types": types, **how})
        progress(1, 2, 0.5)
        progress(2, 2, 0.25)
        return a_report()

    monkeypatch.setattr(kv_report, "measure", measure)
    return asked


def test_the_tables(pykv, measured, text):
    result = pykv("kv-report", "-f", text)
    assert (result.code, result.out.splitlines()) == (0, [
        "1 chunk of 2,048 tokens, seen by queries 1,536 to 2,047; 4 sinks",
        "Error of the attention output in % of its norm, keys and values encoded, or one of them; "
        "where: layer.head",
        "",
        "| type  | bits k | bits v |  median |    95 % |   worst |   where | k median | k worst |"
        " v median | v worst |",
        "| ----- | -----: | -----: | ------: | ------: | ------: | ------: | -------: | ------: |"
        " -------: | ------: |",
        "| q8_0  |   8.50 |   3.00 |   0.600 |   0.690 |   0.700 |     0.1 |    0.500 |   0.600 |"
        "    0.200 |   0.300 |",
        "| kivi2 |   8.50 |   3.00 |    25.0 |     146 |     160 |     1.0 |     20.0 |     150 |"
        "     3.00 |    4.00 |",
        "",
        "Outlier channels of K, above 5 times their head's median: 2 of 96, in 1 of 3 heads",
        "",
        "The 3 heads that stand out most; --layers all shows every head",
        "",
        "| layer | head |  q8_0 | kivi2 | outlier channels of K |",
        "| ----: | ---: | ----: | ----: | --------------------- |",
        "|     1 |    0 | 0.600 |   160 | 20 (8.0x), 5 (6.2x)   |",
        "|     0 |    1 | 0.700 |  25.0 |                       |",
        "|     0 |    0 | 0.500 |  12.0 |                       |",
        "",
        "Rank that keeps 99 % of a head's energy, singular values squared: "
        "K 5 to 16, median 10, of 32; V 2 to 32, median 32, of 32",
        "",
        "Each layer's heads: least and largest rank, and what the best 1/8, 1/4 and 1/2 of the "
        "channels keep, median in %",
        "",
        "| layer |    k rank | k 1/8 | k 1/4 | k 1/2 |    v rank | v 1/8 | v 1/4 | v 1/2 |",
        "| ----: | --------: | ----: | ----: | ----: | --------: | ----: | ----: | ----: |",
        # 4 of 10 and 4 of 16 channels in the middle of 40 and 25 %
        "|     0 |  10 to 16 |  32.5 |  65.0 | 100.0 |        32 |  12.5 |  25.0 |  50.0 |",
        "|     1 |         5 |  80.0 | 100.0 | 100.0 |         2 | 100.0 | 100.0 | 100.0 |",
    ])  # fmt: skip
    assert "[2/2] 0.25 s a layer\n" in result.err
    assert "left out: nuq3; -v says why\n" in result.err
    assert "nuq3: cache type nuq3 needs numbers\n" in pykv("kv-report", "-f", text, "-v").err
    assert pykv("kv-report", "-f", text, "-q").err == ""


def test_which_heads_are_shown(pykv, measured, text):
    lines = pykv("kv-report", "-f", text, "--layers", "all").out.splitlines()
    assert [line.split(" | ")[:2] for line in lines if line.count("|") == 6][2:] == [
        ["|     0", "   0"], ["|     0", "   1"], ["|     1", "   0"],
    ]  # fmt: skip
    assert [line.split(" | ")[:2] for line in lines[-2:]] == [
        ["|     0", " 10 to 16"], ["|     1", "        5"],
    ]  # fmt: skip
    lines = pykv("kv-report", "-f", text, "--layers", "none").out.splitlines()
    assert lines[-3].startswith("Outlier channels of K")
    assert lines[-1].startswith("Rank that keeps 99 % of a head's energy")


def test_json_holds_everything(pykv, measured, text):
    result = pykv("kv-report", "-f", text, "--json")
    assert json.loads(result.out) == a_report().to_dict()
    assert "nuq3" in result.out


def test_what_the_engine_gets(pykv, measured, text):
    load = pykv("kv-report", "m.gguf", "-f", text).calls[-1]
    assert load["model"] == "m.gguf"
    # a chunk is one batch
    assert (load["load"].ctx_size, load["load"].ubatch, load["load"].batch) == (2048,) * 3
    assert measured == [
        {
            "text": b"one two\xff three\n", "types": None, "ctx_size": 2048, "chunks": 1,
            "outlier_ratio": 5,
        }
    ]  # fmt: skip
    args = ("--types", "q8_0, nuq3:outliers=1%", "--chunks", "-1", "--outlier-ratio", "2.5")
    load = pykv("kv-report", "-m", "m.gguf", "-f", text, "-c", "64", "--kv-sinks", "9", *args)
    assert (load.calls[-1]["load"].ctx_size, load.calls[-1]["cache"].sinks) == (64, 9)
    assert measured[-1]["types"] == ["q8_0", "nuq3:outliers=1%"]
    assert (measured[-1]["chunks"], measured[-1]["outlier_ratio"]) == (None, 2.5)
    assert pykv("kv-report", "-f", "-", stdin=b"abc\n").code == 0
    assert measured[-1]["text"] == b"abc"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no text: name a file with -f"),
        (["-f", "x", "--types", "q8_0,,q4_0"], "--types must be cache types with commas between"),
        (["-f", "x", "--types", "q8_0,q4"], "unknown cache type 'q4': it is one of bf16"),
        (["-f", "x", "--chunks", "0"], "chunks must be 1 or more, or -1 for all, not 0"),
        (["-f", "x", "--layers", "some"], "--layers 'some' is unknown: it is one of all, worst"),
        (["-f", "x", "--outlier-ratio", "0.5"], "--outlier-ratio must be 1 or more, not 0.5"),
        (["-f", "x", "--outlier-ratio", "nan"], "--outlier-ratio must be 1 or more, not nan"),
        (["-f", "x", "--plot", "x.jpeg"], "the file's name must end in .png, .pdf, .svg"),
        (["-f", "x", "--plot", "none/x.png"], "there is no such folder, create it first"),
    ],
)
def test_what_makes_no_sense_ends_it_before_the_model_is_loaded(pykv, measured, args, said):
    result = pykv("kv-report", *args)
    assert (result.code, result.out, result.calls) == (2, "", [])
    assert said in result.err
    assert result.err.count("\n") == 1


def test_a_text_that_is_not_there(pykv, measured):
    result = pykv("kv-report", "-f", "none.txt")
    assert (result.code, result.err) == (1, "error: none.txt: No such file or directory\n")
    assert result.calls == []


class Axes:
    """Notes down what is drawn."""

    def __init__(self):
        self.said = {}

    def imshow(self, rows, *, norm, **how):
        self.rows, self.norm = rows, norm
        return self

    def set(self, **words):
        self.said |= words

    def set_yticks(self, ticks, labels):
        self.ticks = dict(zip(ticks, labels, strict=True))


class Figure:
    """Stands in for matplotlib's."""

    made = ()

    def __init__(self, figsize, layout):
        self.axes, self.bars = [], []
        Figure.made.append(self)

    def subplots(self, rows, columns):
        self.axes = [Axes() for _ in range(rows * columns)]
        return self.axes

    def colorbar(self, image, *, ax, label):
        self.bars.append((ax, label))

    def savefig(self, path, dpi):
        Path(path).write_text("drawn")


@pytest.fixture
def matplotlib(monkeypatch):
    """A module of that name, which is not there otherwise; what was drawn is in the list."""
    package = ModuleType("matplotlib")
    package.__spec__ = ModuleSpec("matplotlib", None)
    figure, colors = ModuleType("matplotlib.figure"), ModuleType("matplotlib.colors")
    figure.Figure = Figure
    colors.LogNorm = lambda low, high, clip: SimpleNamespace(low=low, high=high)
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", colors)
    monkeypatch.setattr(Figure, "made", [])
    return Figure.made


def test_the_picture(pykv, measured, text, matplotlib, tmp_path):
    path = tmp_path / "report.PNG"
    result = pykv("kv-report", "-f", text, "--plot", path)
    assert (result.code, path.read_text()) == (0, "drawn")
    assert result.out == pykv("kv-report", "-f", text).out
    above, below = matplotlib[0].axes
    assert [bar[0] for bar in matplotlib[0].bars] == [above, below]
    # a row for each type, a column for each layer
    np.testing.assert_allclose(above.rows, [[0.7, 0.6], [25, 160]])
    assert above.ticks == {0: "q8_0", 1: "kivi2"}
    assert (above.norm.low, above.norm.high) == (pytest.approx(0.6), pytest.approx(160))
    # a row for each layer, a column for each channel of each head; the second layer has one head
    assert [len(row) for row in below.rows] == [64, 64]
    assert below.rows[0] == [1] * 64
    assert below.rows[1][:32] == [8 if i == 20 else 6.25 if i == 5 else 1 for i in range(32)]
    assert all(math.isnan(x) for x in below.rows[1][32:])
    assert (below.norm.low, below.norm.high) == (1, 8)


def test_without_matplotlib_one_sentence_says_how_to_get_it(pykv, measured, text, monkeypatch):
    find_spec = kv_module().importlib.util.find_spec
    monkeypatch.setattr(
        kv_module().importlib.util, "find_spec",
        lambda name: None if name == "matplotlib" else find_spec(name),
    )  # fmt: skip
    result = pykv("kv-report", "-f", text, "--plot", "x.png")
    assert (result.code, result.calls) == (2, [])
    assert result.err == (
        'error: --plot draws with matplotlib, which is not here: pip install "pykv[plot]"\n'
    )


def kv_module():
    from pykv.cli import kv_report

    return kv_report


def test_a_real_picture(pykv, measured, text, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    for suffix, begins in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        path = tmp_path / f"report{suffix}"
        assert pykv("kv-report", "-f", text, "--plot", path).code == 0
        assert path.read_bytes().startswith(begins)


def test_on_the_real_engine(run, reciter):
    text = b"Some text, said again and again.\n" * 30
    args = ("kv-report", reciter, "-f", "-", "-t", "1", "-c", "288")
    code, out, err = run(*args, "--types", "f32,q8_0,kivi2", "--layers", "all", stdin=text)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "1 chunk of 288 tokens, seen by queries 216 to 287; 4 sinks"
    rows = {line.split("|")[1].strip(): line.split("|") for line in lines if line.count("|") == 12}
    medians = [float(rows[name][4]) for name in ("f32", "q8_0", "kivi2")]
    assert medians[0] == 0
    assert 0 < medians[1] < 2 < medians[2]
    assert sum(line.count("|") == 7 for line in lines) == 2 + 2 * 2  # two layers of two heads
    assert [line.count("|") for line in lines[-4:]] == [10] * 4
