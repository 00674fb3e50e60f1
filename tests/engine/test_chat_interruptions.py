"""What a prompt or an answer that was stopped, or failed, leaves of a conversation."""

import pytest
from small_model import TRIMMING, anew, assistant, user

from pykv.errors import CacheFullError, CancelledError, NumericsError, TemplateError


def never(model, monkeypatch, what):
    """Make the next call of the model fail half-way through its batch."""
    real = model.dev.run

    def run(graph, step):
        monkeypatch.setattr(model.dev, "run", real)
        raise what

    monkeypatch.setattr(model.dev, "run", run)


class TestInterruptions:
    """A prompt that was not read leaves the conversation, the cache and its reuse as before."""

    @pytest.fixture
    def talk(self, plain):
        model = plain(ctx_size=200, ubatch=16)
        chat = model.chat("Rules")
        list(chat.send("one", max_tokens=5))
        return model, chat

    @pytest.mark.parametrize("again", [False, True], ids=["send", "retry"])
    @pytest.mark.parametrize(
        "error",
        [CancelledError("x"), KeyboardInterrupt(), NumericsError("x"), MemoryError()],
        ids=repr,
    )
    @pytest.mark.parametrize("batches", [0, 2])
    def test_while_reading(self, talk, monkeypatch, again, error, batches):
        model, chat = talk
        if again:
            list(chat.send("long " * 8, max_tokens=5))
        before = chat.messages, model.store.nbytes
        real, left = model.step, [batches]

        def step(*args):
            if not left[0]:
                raise error
            left[0] -= 1
            return real(*args)

        monkeypatch.setattr(model, "step", step)
        generation = chat.retry() if again else chat.send("long " * 8)
        if isinstance(error, CancelledError):
            assert list(generation) == []
            assert generation.stats.finish == "cancelled"
        else:
            with pytest.raises(type(error)):
                next(generation)
        monkeypatch.undo()
        assert left == [0]
        assert not generation.prompt_read
        assert (chat.messages, model.store.nbytes) == before
        following = chat.send("two", max_tokens=5)
        assert "".join(following) == anew(model, [*before[0], user("two")], 5)
        # all that was read before is used again: but for the new message, one token at most
        new = len("\nuser\ntwo\nassistant\n") + 4
        assert following.stats.read_tokens <= new + 1

    def test_within_a_batch(self, talk, monkeypatch):
        model, chat = talk
        before = chat.messages, model.store.nbytes
        never(model, monkeypatch, CancelledError("x"))
        assert list(chat.send("long " * 8)) == []
        assert (chat.messages, model.store.nbytes) == before

    def test_a_message_that_does_not_fit(self, talk):
        model, chat = talk
        before = chat.messages, model.store.nbytes
        with pytest.raises(CacheFullError, match=r"of the context's 200 are free; raise ctx_size"):
            next(chat.send("x" * 200))
        assert (chat.messages, model.store.nbytes) == before
        messages = [*before[0], user("two")]
        assert "".join(chat.send("two", max_tokens=3)) == anew(model, messages, 3)

    def test_a_conversation_that_outgrows_the_context(self, load, small):
        model = load(recite=True, ctx_size=100)
        chat, full = model.chat(), None
        for i in range(4):
            messages = chat.messages
            try:
                generation = chat.send(f"message {i}")
                text = "".join(generation)
            except CacheFullError as error:
                full = error
                break
            assert small.RECITED.startswith(text)
            assert (generation.stats.finish == "stop") == (text == small.RECITED)
        assert full is not None
        assert chat.messages == messages
        assert chat.undo()
        assert len(chat.messages) == len(messages) - 2

    def test_an_answer_that_fills_the_context(self, load, small):
        model = load(recite=True, ctx_size=40)
        chat = model.chat()
        generation = chat.send("one")
        text = "".join(generation)
        assert generation.stats.finish == "context"
        assert small.RECITED.startswith(text)
        assert text not in ("", small.RECITED)
        assert chat.messages[-1] == assistant(text)

    def test_a_template_that_refuses(self, load):
        refusing = (
            TRIMMING + "{% if messages | length > 2 %}{{ raise_exception('enough') }}{% endif %}"
        )
        model = load(recite=True, template=refusing)
        chat = model.chat()
        list(chat.send("one"))
        before = chat.messages, model.store.nbytes
        with pytest.raises(TemplateError, match="enough"):
            chat.send("two")
        assert (chat.messages, model.store.nbytes) == before

    @pytest.mark.parametrize("how", ["cancel", "close", "drop", "send", "interrupt"])
    def test_an_answer_stopped_half_way_counts(self, plain, monkeypatch, how):
        model = plain()
        chat = model.chat()
        generation = chat.send("one", max_tokens=20)
        said = "".join(next(generation) for _ in range(3))
        if how == "cancel":
            generation.cancel()
            assert list(generation) == []
        elif how == "close":
            generation.close()
        elif how == "interrupt":
            never(model, monkeypatch, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                next(generation)
        if how != "send":
            del generation
            assert chat.messages == [user("one"), assistant(said)]
        following = chat.send("two", max_tokens=5)
        messages = [user("one"), assistant(said), user("two")]
        assert "".join(following) == anew(model, messages, 5)
        assert following.stats.read_tokens <= len("\nuser\ntwo\nassistant\n") + 4 + 1

    def test_an_interrupt_right_after_a_token_was_read(self, plain, monkeypatch):
        model = plain()
        chat = model.chat()
        generation = chat.send("one", max_tokens=20)
        said = "".join(next(generation) for _ in range(3))
        real = model.step

        def step(*args):
            real(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(model, "step", step)
        with pytest.raises(KeyboardInterrupt):
            next(generation)
        monkeypatch.undo()
        messages = [user("one"), assistant(said), user("two")]
        assert "".join(chat.send("two", max_tokens=5)) == anew(model, messages, 5)

    def test_one_never_iterated_leaves_nothing(self, plain):
        model = plain()
        chat = model.chat()
        list(chat.send("one", max_tokens=5))
        before = chat.messages, model.store.nbytes
        kept = chat.send("long " * 20)
        assert (chat.messages, model.store.nbytes) == before
        assert chat.undo()
        assert list(kept) == []
        assert chat.messages == []
