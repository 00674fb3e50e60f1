"""Generation: pieces, ends, interruptions, and what they leave in the cache."""

import gc
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykv.config import CacheConfig
from pykv.engine.session import Session, StopText
from pykv.errors import CacheFullError, CancelledError, ConfigError, NumericsError

WORDS = "some words to read " * 20  # 380 tokens of the small vocabulary


def prompt_cancel(generation, model, monkeypatch, calls):
    """Cancel once the model has asked `calls` times whether it should go on."""
    real, asked = model.step, [0]

    def step(batch, outputs, cancelled=None):
        def counting():
            asked[0] += 1
            if asked[0] == calls:
                generation.cancel()
            return cancelled()

        return real(batch, outputs, counting)

    monkeypatch.setattr(model, "step", step)
    return asked


class TestStopText:
    @given(
        st.lists(st.text("ab-", max_size=3), max_size=8),
        st.lists(st.text("ab-", min_size=1, max_size=4), max_size=3),
    )
    def test_shows_what_stands_before_the_first_stop_string_and_no_more(self, pieces, stops):
        stop, shown, met = StopText(stops), "", False
        for piece in pieces:
            text, met = stop.push(piece)
            shown += text
            if met:
                break
        else:
            shown += stop.flush()
        # the truth: the first moment at which a stop string stands in the text, cut at its place
        so_far, expected = "", None
        for piece in pieces:
            so_far += piece
            places = [so_far.find(s) for s in stops if s in so_far]
            if places:
                expected = so_far[: min(places)]
                break
        assert met == (expected is not None)
        assert shown == (so_far if expected is None else expected)

    def test_holds_back_only_what_may_begin_a_stop_string(self):
        stop = StopText(["END", "\n\n"])
        assert stop.push("one\n") == ("one", False)
        assert stop.push("two E") == ("\ntwo ", False)
        assert stop.push("N") == ("", False)
        assert stop.push("V") == ("ENV", False)


class TestPieces:
    def test_the_recited_text_comes_in_pieces_that_join_to_it(self, load, small):
        generation = load(recite=True).generate("\n")
        pieces = list(generation)
        assert "".join(pieces) == generation.text == small.RECITED
        assert all(pieces)
        # é and € are two and three tokens, and no piece is a part of one
        assert pieces == list(small.RECITED)
        assert generation.tokens == list(small.RECITED.encode())
        assert generation.stats.finish == "stop"
        assert generation.stats.generated_tokens == len(small.RECITED.encode())
        assert generation.stats.prompt_tokens == 1
        assert list(generation) == []

    def test_random_bytes_never_split_a_character(self, load):
        model = load(temperature=2.0, seed=11, suppress=(257, 258, 259))
        generation = model.generate("ab", max_tokens=200)
        text = "".join(generation)
        assert text == generation.text == model.tokenizer.decode(generation.tokens)

    def test_control_tokens_are_shown_on_request_only(self, load, small):
        said = small.ID["<|im_start|>"]
        only = tuple(i for i in range(len(small.TOKENS)) if i != said)
        model = load(suppress=only)
        assert "".join(model.generate("a", max_tokens=2)) == ""
        shown = model.generate("a", max_tokens=2, keep_special=True)
        assert "".join(shown) == "<|im_start|>" * 2

    @pytest.mark.parametrize("n", [0, 1, 5])
    def test_max_tokens(self, load, small, n):
        generation = load(recite=True).generate("\n", max_tokens=n)
        assert "".join(generation) == small.RECITED[:n]
        assert (generation.stats.finish, generation.stats.generated_tokens) == ("length", n)

    def test_a_length_that_cuts_a_character_is_seen_in_the_text(self, load, small):
        n = len("abcdefghijklmnopqrstuvwxyz") + 1
        generation = load(recite=True).generate("\n", max_tokens=n)
        assert "".join(generation) == generation.text == small.RECITED[:26] + "\ufffd"

    def test_max_tokens_must_be_a_count(self, load):
        with pytest.raises(ConfigError, match="max_tokens must be 0 or more"):
            load(recite=True).generate("\n", max_tokens=-1)

    @pytest.mark.parametrize(
        ("stops", "shown"),
        [
            (["fgh"], "abcde"),
            ("fgh", "abcde"),  # one text is one stop string
            (["zé€!"], "abcdefghijklmnopqrstuvwxy"),
            (["mn", "lmno"], "abcdefghijkl"),
            (["", "b"], "a"),
        ],
    )
    def test_stop_strings(self, load, stops, shown):
        generation = load(recite=True).generate("\n", stop=stops)
        assert "".join(generation) == generation.text == shown
        assert generation.stats.finish == "stop"
        assert generation.stopped_by_text

    @pytest.mark.parametrize("n", [None, 29])
    def test_what_was_held_back_is_shown_at_the_end(self, load, small, n):
        end = 26 if n is None else n - 3  # é and € take three tokens more than characters
        generation = load(recite=True).generate("\n", stop=["xyz?", "z!", "yzé€!!"], max_tokens=n)
        assert "".join(generation) == (
            small.RECITED if n is None else small.RECITED[:end] + "é\ufffd"[: n - 26 - 1]
        )
        assert not generation.stopped_by_text


class TestContext:
    def test_a_full_context_ends_the_answer_and_says_so(self, load, small):
        generation = load(recite=True, ctx_size=12).generate("xxx\n")
        assert "".join(generation) == small.RECITED[:9]  # 4 + 8 fill it, and one more is known
        assert generation.stats.finish == "context"

    def test_a_prompt_that_is_too_long_is_refused_whole(self, load):
        model = load(ctx_size=12)
        before = model.store.nbytes
        generation = model.generate("x" * 13)
        with pytest.raises(CacheFullError, match="13 tokens are to be read, and 12 of the context"):
            next(generation)
        assert model.store.nbytes == before
        assert "".join(model.generate("x" * 12, max_tokens=1)) != ""


class TestInterruptions:
    """Whatever ends a generation, the cache holds as much as before."""

    def test_an_iterated_one(self, load):
        model = load(recite=True)
        list(model.generate("\n"))
        assert model.store.nbytes == 0

    def test_one_never_iterated(self, load):
        model = load(recite=True)
        generation = model.generate("\n")
        assert model.store.nbytes == 0
        generation.close()
        assert list(generation) == []

    def test_one_dropped_half_way_at_once(self, load):
        model = load(recite=True)
        generation = model.generate("\n")
        next(generation)
        assert model.store.nbytes > 0
        gc.disable()  # no cycle may keep it
        try:
            del generation
            assert model.store.nbytes == 0
        finally:
            gc.enable()

    def test_close(self, load):
        model = load(recite=True)
        generation = model.generate("\n")
        next(generation)
        next(generation)
        generation.close()
        assert model.store.nbytes == 0
        assert (generation.text, generation.stats.finish) == ("ab", "cancelled")
        assert generation.stats.cache_bytes > 0
        assert list(generation) == []

    @pytest.mark.parametrize("device", ["cpu", "reference"])
    @pytest.mark.parametrize("calls", [1, 2])
    def test_cancel_while_reading(self, load, monkeypatch, device, calls):
        model = load(ubatch=100, device=device)
        generation = model.generate(WORDS)
        asked = prompt_cancel(generation, model, monkeypatch, calls)
        assert list(generation) == []
        assert asked == [calls]
        assert generation.stats.finish == "cancelled"
        assert not generation.prompt_read
        assert model.store.nbytes == 0

    def test_cancel_in_a_later_batch(self, load, monkeypatch):
        model = load(ubatch=100)
        probe = model.generate(WORDS, max_tokens=1)
        asked = prompt_cancel(probe, model, monkeypatch, -1)
        list(probe)
        monkeypatch.undo()
        assert asked[0] > 4  # more often than there are batches
        generation = model.generate(WORDS)
        prompt_cancel(generation, model, monkeypatch, asked[0] * 3 // 4)
        assert list(generation) == []
        assert model.store.nbytes == 0

    def test_cancel_before_it_begins(self, load):
        model = load(recite=True)
        generation = model.generate("\n")
        generation.cancel()
        assert list(generation) == []
        assert generation.stats.finish == "cancelled"

    def test_cancel_while_generating(self, load):
        model = load(recite=True)
        generation = model.generate("\n", stop=["bcx"])
        assert next(generation) == "a"
        generation.cancel()
        assert "".join(generation) == ""
        assert generation.text == "a"
        assert generation.stats.finish == "cancelled"
        assert model.store.nbytes == 0

    def test_cancel_from_another_thread(self, load, small):
        ends = tuple(small.ID[c] for c in small.CONTROLS)
        model = load(suppress=ends, ctx_size=100_000, check_memory=False)
        generation = model.generate("go on")
        timer = threading.Timer(0.2, generation.cancel)
        timer.start()
        text = "".join(generation)
        timer.join()
        assert generation.stats.finish == "cancelled"
        assert text == model.tokenizer.decode(generation.tokens)
        assert model.store.nbytes == 0

    @pytest.mark.parametrize("after", [0, 3])
    @pytest.mark.parametrize("committed", [False, True])
    def test_keyboard_interrupt(self, load, monkeypatch, after, committed):
        model = load(recite=True)
        generation = model.generate("\n")
        for _ in range(after):
            next(generation)
        real = model.step

        def step(*args):
            if committed:
                real(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(model, "step", step)
        with pytest.raises(KeyboardInterrupt):
            next(generation)
        monkeypatch.undo()
        assert model.store.nbytes == 0
        assert list(generation) == []
        assert "".join(model.generate("\n", max_tokens=3)) == "abc"

    @pytest.mark.parametrize("device", ["cpu", "reference"])
    def test_keys_that_are_no_numbers(self, load, device):
        model = load(broken=True, device=device)
        generation = model.generate(WORDS)
        with pytest.raises(
            NumericsError, match="layer 1, position 0: a key or value is not a fini"
        ):
            next(generation)
        assert model.store.nbytes == 0
        assert not generation.prompt_read

    def test_after_the_model_was_closed(self, load):
        model = load(recite=True)
        running, waiting = model.generate("\n"), model.generate("\n")
        next(running)
        model.close()
        for generation in running, waiting:
            with pytest.raises(ConfigError, match="the model is closed; load it again"):
                next(generation)
        with pytest.raises(ConfigError, match="the model is closed; load it again"):
            model.generate("\n")


class TestSession:
    def test_tokens_are_what_the_cache_holds(self, load, monkeypatch):
        model = load(ubatch=10)
        session = Session(model)
        real, calls = model.step, [0]

        def step(*args):
            calls[0] += 1
            if calls[0] == 3:
                real(*args)
                raise KeyboardInterrupt
            if calls[0] == 4:
                raise CancelledError("the run was stopped")
            return real(*args)

        monkeypatch.setattr(model, "step", step)
        ids = list(range(40, 85))
        with pytest.raises(KeyboardInterrupt):
            session.read(ids)
        assert session.tokens == ids[:30]  # the third batch had counted
        with pytest.raises(CancelledError):
            session.read(ids[30:])
        assert session.tokens == ids[:30]
        logits = session.read(ids[30:])
        assert session.tokens == ids
        np.testing.assert_allclose(logits, model.logits(ids)[-1], atol=1e-4)

    def test_a_fork_goes_its_own_way(self, load):
        model = load(deterministic=True)
        first = Session(model)
        first.read([5, 6, 7])
        second = first.fork()
        a, b = first.read([8, 9]), second.read([80])
        np.testing.assert_array_equal(a, model.logits([5, 6, 7, 8, 9])[-1])
        np.testing.assert_array_equal(b, model.logits([5, 6, 7, 80])[-1])
        assert (first.tokens, second.tokens) == ([5, 6, 7, 8, 9], [5, 6, 7, 80])
        first.free()
        first.free()
        assert (len(first), len(second)) == (0, 4)
        del second
        assert model.store.nbytes == 0

    def test_truncate(self, load):
        model = load(deterministic=True)
        session = Session(model)
        session.read(list(range(100)))
        assert session.truncate(70) == 70
        assert session.truncate(90) == 70
        assert session.tokens == list(range(70))
        again = session.read([200, 201])
        np.testing.assert_array_equal(again, model.logits([*range(70), 200, 201])[-1])

    def test_less_than_nothing(self, load):
        session = Session(load())
        session.read([1, 2, 3])
        with pytest.raises(ConfigError, match="cannot go back to -1 tokens"):
            session.truncate(-1)
        assert len(session) == 3

    @pytest.mark.parametrize("policy", ["full", "sinks"])
    def test_a_batch_that_makes_no_sense(self, load, policy):
        budget = None if policy == "full" else "64"
        model = load(cache=CacheConfig(policy=policy, budget=budget))
        number, one = model.store.new_sequence(), np.zeros(1, np.int32)
        for batch, what in (
            ([], "needs sequences"),
            ([(number, one[:0])], "a token at least"),
            ([(number, one), (number, one)], "twice"),
        ):
            with pytest.raises(ConfigError, match=what):
                model.step(batch, one)
        assert model.store.length(number) == 0
        assert model.step([(number, one)], one).shape == (1, model.n_vocab)

    def test_nothing_to_read(self, load):
        with pytest.raises(ConfigError, match="the prompt has no tokens"):
            Session(load()).read([])


def test_seconds_are_those_of_the_model_and_not_of_the_reader(load):
    generation = load(recite=True).generate("\n", max_tokens=4)
    for _ in generation:
        time.sleep(0.2)
    stats = generation.stats
    assert 0 < stats.prompt_seconds < 10
    assert 0 < stats.generated_seconds < 0.6  # four pauses would be 0.8
