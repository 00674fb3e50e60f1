import io
import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykv.cli import render
from pykv.cli.options import Output
from pykv.engine.stats import Stats


class Terminal(io.StringIO):
    def isatty(self):
        return True


@given(st.text())
def test_harmless_text_holds_no_control_character(text):
    shown = render.harmless(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    printable = "".join(c for c in text if ord(c) >= 160 or 32 <= ord(c) < 127)
    kept = "".join(c for c in shown if ord(c) >= 160 or 32 <= ord(c) < 127)
    assert [c for c in kept if c not in "\u2421\ufffd" and not 0x2400 <= ord(c) < 0x2420] == [
        c for c in printable if c not in "\u2421\ufffd" and not 0x2400 <= ord(c) < 0x2420
    ]


def test_text_is_raw_in_a_pipe_and_harmless_on_a_terminal(monkeypatch):
    text = "a\x1b]0;title\x07b\x9bc\r\nd\te\x00"
    for stream, want in (
        (io.StringIO(newline=""), text),
        (Terminal(), "a␛]0;title␇b\ufffdc\nd\te␀"),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        render.Screen(Output()).text(text)
        assert stream.getvalue() == want


def test_what_a_stream_cannot_spell_is_replaced(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    render.Screen(Output()).line("é\udcff!")
    assert stream.buffer.getvalue() == b"??!\n"


def test_closed_streams_are_no_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    screen = render.Screen(Output())
    screen.line("x")
    screen.note("x")
    with screen.progress() as progress:
        progress("stage", 1, 2)
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (Output(), ["warning: w", "note"]),
        (Output(quiet=True), []),
        (Output(verbose=True), ["info: i", "warning: w", "note", "detail"]),
    ],
)
def test_levels(output, shown, capsys):
    log = logging.getLogger("pykv")
    with render.Screen(output) as screen:
        log.info("i")
        log.warning("w")
        screen.note("note")
        screen.detail("detail")
    log.warning("after")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == shown


def test_the_log_is_left_as_it_was():
    log = logging.getLogger("pykv")
    before = (log.level, log.propagate, list(log.handlers))
    with pytest.raises(ValueError, match="x"), render.Screen(Output(verbose=True)):
        raise ValueError("x")
    assert (log.level, log.propagate, list(log.handlers)) == before


def test_table_aligns(capsys):
    render.Screen(Output()).table(["name", "n"], [["a", 1], ["longer", 1234]])
    assert capsys.readouterr().out == "name        n\na           1\nlonger  1,234\n"


def test_progress_without_a_terminal_is_a_line_per_stage(capsys):
    with render.Screen(Output()).progress() as progress:
        for i in range(5):
            progress("compiling [x]", i, 5)
        progress("loading", 0, 0)
    assert capsys.readouterr() == ("", "compiling [x]\nloading\n")


def test_progress_on_a_terminal_is_a_bar_on_stderr(monkeypatch):
    out, err = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    with render.Screen(Output()).progress() as progress:
        progress("compiling [bold]x[/bold]", 1, 4)
        progress("compiling [bold]x[/bold]", 2, 4)
    assert out.getvalue() == ""
    assert "compiling [bold]x[/bold]" in err.getvalue()
    assert "50%" in err.getvalue()


def test_a_bar_that_never_moves_draws_nothing(monkeypatch):
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    with render.Screen(Output()).progress():
        pass
    assert err.getvalue() == ""


def test_stats_say_every_figure(capsys):
    stats = Stats(
        prompt_tokens=110,
        cached_tokens=10,
        prompt_seconds=2.0,
        generated_tokens=30,
        generated_seconds=1.5,
        cache_bytes=3 << 20,
        cache_reserved_bytes=4 << 20,
        cache_f16_bytes=6 << 20,
        weight_bytes=90 << 20,
        load_seconds=0.25,
        compile_seconds=9,
        threads=2,
        seed=7,
        plan=("q4_1: simd",),
        finish="length",
    )
    render.Screen(Output(quiet=True)).stats(stats)
    out, err = capsys.readouterr()
    assert out == ""
    for figure in (
        "110 tokens, 10 of them cached, 2.000 s, 50.0 tokens/s",
        "30 tokens, 1.500 s, 20.0 tokens/s, ended by length",
        "3.00 MiB in use, 4.00 MiB reserved, 6.00 MiB as f16",
        "90.0 MiB",
        "0.25 s, compiling: 9.00 s",
        "threads: 2, seed: 7",
        "q4_1: simd",
    ):
        assert figure in err


def test_json_keeps_characters(capsys):
    render.Screen(Output()).json({"text": "é\x1b"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"text": "é\x1b"}
    assert "é" in out


def test_plain_is_one_short_line():
    assert render.plain("a\n b\tc") == "a b c"
    assert render.plain("x" * 200, 10) == "xxxxxxx..."
