import json
import os
import re
import signal
import sys
import time

import pytest
from terminal import PAUSE

LEAVE = KeyboardInterrupt()


def test_a_conversation(keyboard):
    result = keyboard("hello", "", "  ", "bye", "/exit", "never")
    assert (result.code, result.left) == (0, ["never"])
    assert result.out == "you said 'hello' \nyou said 'bye' \n"
    assert "default.gguf (fake, 64 tokens of context)" in result.err


def test_the_end_of_the_input_leaves(keyboard):
    assert keyboard("hello").code == 0


def test_ctrl_c_at_the_empty_prompt_leaves_at_the_second(keyboard):
    assert keyboard(LEAVE, LEAVE, "never").left == ["never"]
    result = keyboard(LEAVE, "hello", LEAVE, "again", "/exit")
    assert (result.left, result.out) == ([], "you said 'hello' \nyou said 'again' \n")
    assert result.err.count("Ctrl-C once more, Ctrl-D or /exit leaves.") == 2


def test_a_backslash_continues_a_message(keyboard):
    assert keyboard("one\\", "two\\", "three").out == "you said 'one\\ntwo\\nthree' \n"


def test_a_double_slash_is_text(keyboard):
    assert keyboard("//help me").out == "you said '/help me' \n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/hepl", "/hepl is no command: did you mean /help?; //hepl sends it."),
        ("/", "/ is no command: /help lists the commands; // sends it."),
        ("/etc/passwd is a file", "/etc/passwd is no command"),
        ("/undo", "There is nothing to take back."),
        ("/retry", "There is no message to answer again."),
        ("/stats", "There was no answer yet."),
        ("/save", "/save needs the name of a file."),
    ],
)
def test_a_command_that_cannot_be_is_a_sentence(keyboard, line, sentence):
    result = keyboard(line)
    assert (result.code, result.out) == (0, "")
    assert sentence in result.err


def test_help_lists_every_command(keyboard):
    err = keyboard("/help").err
    for name in ("help", "clear", "undo", "retry", "system", "save", "stats", "exit"):
        assert re.search(rf"^(> )?/{name} ", err, re.MULTILINE)


def test_undo_retry_clear_and_system(keyboard, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    result = keyboard(
        "a", "b", "/undo", "/retry", f"/save {first}", "/clear", f"/save {second}",
        "/system be brief ", "c", "/system", "d",
    )  # fmt: skip
    assert result.out == (
        "you said 'a' \nyou said 'b' \nyou said 'a again' \nyou said 'be briefc' \nyou said 'd' \n"
    )
    assert [m["content"] for m in json.loads(first.read_text())] == [
        "a again",
        "you said 'a again' ",
    ]
    assert json.loads(second.read_text()) == []


def test_save_replaces_nothing_without_saying_so(keyboard, tmp_path):
    file = tmp_path / "talk é.txt"
    file.write_text("precious")
    result = keyboard("hello", f"/save {file}", f"/save {tmp_path / 'other'}")
    assert f"{file} exists: the same /save once more replaces it." in result.err
    assert file.read_text() == "precious"
    result = keyboard("hello", f"/save {file}", f"/save {file}", f"/save {file}")
    assert f"2 messages written to {file}, which was replaced." in result.err
    assert result.err.count("exists") == 2
    assert file.read_text(encoding="utf-8") == ("user:\nhello\n\nassistant:\nyou said 'hello' \n")


def test_save_where_nothing_can_be_written_is_one_line(keyboard, tmp_path):
    result = keyboard(f"/save {tmp_path / 'no' / 'where'}", "hello")
    assert f"error: {tmp_path / 'no' / 'where'}: No such file or directory\n" in result.err
    assert result.out == "you said 'hello' \n"


def test_stats(keyboard):
    assert "ended by stop" in keyboard("hello", "/stats", args=["-q"]).err


def test_a_full_context_is_said_and_the_talk_goes_on(keyboard):
    result = keyboard("overflow", "brim", "hello")
    assert "error: the context of 64 tokens is full: 99 more do not fit\n" in result.err
    assert "The context of 64 tokens is full: the answer was cut here." in result.err
    assert result.out == "you said 'brim' \nyou said 'hello' \n"


def test_a_stopped_answer_is_said_and_the_talk_goes_on(keyboard, engine):
    def press(self):
        for piece in iterate(self):
            yield piece
            os.kill(os.getpid(), signal.SIGINT)

    iterate = engine.Generation.__iter__
    engine.Generation.__iter__ = press
    before = signal.getsignal(signal.SIGINT)
    result = keyboard("hello", "/stats", "again")
    assert result.out == "you \nyou \n"
    assert result.err.count("(stopped)") == 2
    assert "ended by cancelled" in result.err
    assert signal.getsignal(signal.SIGINT) is before


def test_limits(keyboard):
    assert keyboard("a", args=["-n", "1"]).out == "you \n"
    assert keyboard("a b", args=["-r", "b"]).out == "you said 'a \n"
    assert keyboard("a", "/retry", args=["-n", "2"]).out == "you said \nyou said \n"


def test_a_message_on_the_command_line_or_piped_is_answered_once(pykv, tmp_path):
    file = tmp_path / "message"
    file.write_text("/help\n")
    for result in (
        pykv("chat", "-p", "/help"),
        pykv("chat", "-f", file),
        pykv("chat", stdin=b"/help\n"),
    ):
        assert (result.code, result.out) == (0, "you said '/help' \n")
    result = pykv("chat", "-p", "x", "-sys", "be brief ", "--json")
    assert json.loads(result.out)["text"] == "you said 'be brief x' "


def test_a_full_context_ends_a_single_answer_with_an_error(pykv):
    result = pykv("chat", "-p", "overflow")
    assert (result.code, result.out) == (1, "")
    assert result.err.endswith("error: the context of 64 tokens is full: 99 more do not fit\n")


@pytest.mark.parametrize("data", [b"", b"\n", b" \t\n"])
def test_an_empty_pipe_is_one_line(pykv, data):
    result = pykv("chat", stdin=data)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: the message is empty")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")
class TestAtATerminal:
    def test_ctrl_c_stops_the_answer_and_not_the_program(self, terminal):
        t = terminal("chat")
        t.until("> ")
        t.type(b"slow\r")
        t.until("you said")
        start = time.monotonic()
        t.type(b"\x03")
        t.until("(stopped)")
        # one piece takes 10 ms; the rest is the machine
        assert time.monotonic() - start < 1
        t.until("> ")
        t.type(b"hello\r")
        t.until("you said 'hello' ")
        t.until("> ")
        t.type(b"\x04")
        t.until("<left>")
        assert t.program.wait(10) == 0

    def test_a_second_ctrl_c_ends_an_answer_that_will_not_stop(self, terminal):
        t = terminal("chat")
        t.until("> ")
        t.type(b"deaf\r")
        t.until("you said")
        t.type(b"\x03")
        t.until("you said")
        t.type(b"\x03")
        t.until("(stopped)")
        t.until("> ")

    def test_ctrl_c_twice_at_the_prompt_leaves(self, terminal):
        t = terminal("chat")
        t.until("> ")
        time.sleep(PAUSE)
        t.type(b"\x03")
        t.until("Ctrl-C once more")
        t.until("> ")
        time.sleep(PAUSE)
        t.type(b"\x03")
        t.until("<left>")
        assert t.program.wait(10) == 0

    def test_control_characters_of_an_answer_do_not_reach_the_terminal(self, terminal):
        t = terminal("chat", "-p", r"\x1b]0;x\x07", "-r", "zz")
        shown = t.until("<left>")
        answer = re.search(r"you said .*", shown)[0]
        assert "\x1b" not in answer
        assert "\x07" not in answer

    def test_history(self, terminal):
        t = terminal("chat")
        t.until("> ")
        t.type(b"first\r")
        t.until("you said 'first' ")
        t.until("> ")
        t.type(b"\x1b[A\r")  # the arrow up
        t.until("you said 'first' ")
