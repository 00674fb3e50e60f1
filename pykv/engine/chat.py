"""A conversation: messages on one side, a cached sequence on the other.

Before each turn the sequence is forked, which costs at most a partly filled page; a stopped prompt,
`undo` and `retry` go back to that fork. After a turn only the new text is read: the rendering so
far, plus the answer as it was generated, must be a prefix of the new rendering. Where a template
rewrites the past it is not, and the longest common run of tokens is kept instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykv.engine.session import Generation, Session
from pykv.engine.stats import Stats
from pykv.errors import ConfigError
from pykv.tokenizer import ChatTemplate, Span, encode_chat

if TYPE_CHECKING:
    from pykv.engine.model import Model


@dataclass
class _Turn:
    """The state before a message: what to go back to."""

    session: Session
    messages: list[dict[str, str]]
    text: str | None


class Chat:
    """A conversation with a model.  `messages` are dicts of `role` and `content`."""

    def __init__(self, model: Model, template: ChatTemplate, system: str | None) -> None:
        self._model, self._template = model, template
        self.messages: list[dict[str, str]] = []
        self.stats: Stats | None = None
        self._session = Session(model)
        self._text: str | None = ""  # what the sequence holds, rendered; None: not known exactly
        self._turns: list[_Turn] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Set the system message, or remove it; the next answer reads the conversation anew."""
        rest = [m for m in self.messages if m["role"] != "system"]
        first = [{"role": "system", "content": text}] if text else []
        self.messages = first + rest
        for turn in self._turns:
            turn.messages = first + [m for m in turn.messages if m["role"] != "system"]
            turn.text = None
        self._text = None if self._session.tokens else ""

    def clear(self) -> None:
        """Forget the conversation; the system message stays."""
        for turn in self._turns:
            turn.session.free()
        self._turns = []
        self._session.free()
        self._session, self._text = Session(self._model), ""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def undo(self) -> bool:
        """Take back the last message and its answer.  False: there is none."""
        if not self._turns:
            return False
        turn = self._turns.pop()
        self._session.free()
        self._session, self.messages, self._text = turn.session, turn.messages, turn.text
        return True

    def retry(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Generation:
        """Answer the last message again.  Raises ConfigError: there is none."""
        said = [m["content"] for m in self.messages if m["role"] == "user"]
        if not self.undo():
            raise ConfigError("there is no message to answer again")
        return self.send(said[-1], max_tokens=max_tokens, stop=stop)

    def send(
        self, text: str, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Generation:
        """Say something; the answer streams from the result.

        The turn counts once its prompt was read. Raises TemplateError: the template refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        controls = self._model.tokenizer.controls_in
        spans = self._template.render(messages, add_generation_prompt=True, controls=controls)
        rendered = "".join(s.text for s in spans)
        turn = _Turn(self._session.fork(), list(self.messages), self._text)
        try:
            prompt = self._new_tokens(messages, spans, rendered)
        except BaseException:
            self._go_back(turn)
            raise

        def end(generation: Generation) -> None:
            self.stats = generation.stats
            if not generation.prompt_read:
                return
            self._turns.append(turn)
            self.messages = [*messages, {"role": "assistant", "content": generation.text}]
            # the last token may not have been read, and a stop string is no part of the answer
            read = self._session.tokens[-len(generation.tokens) :] if generation.tokens else []
            exact = read == generation.tokens and not generation.stopped_by_text
            whole = self._model.tokenizer.decode(generation.tokens) == generation.text
            self._text = rendered + generation.text if exact and whole else None

        return Generation(
            self._model, self._session, prompt, self._model.sampler(),
            max_tokens=max_tokens, stop=stop, on_end=end, on_failure=lambda: self._go_back(turn),
        )  # fmt: skip

    def _go_back(self, turn: _Turn) -> None:
        self._session.free()
        self._session, self._text = turn.session, turn.text

    def _new_tokens(
        self, messages: list[dict[str, str]], spans: Sequence[Span], rendered: str
    ) -> list[int]:
        """Tokens to read so that the sequence holds the rendering; it may be cut first."""
        tokenizer = self._model.tokenizer
        if self._text and rendered.startswith(self._text):
            rest = tokenizer.encode_spans(_after(spans, len(self._text)), add_special=False)
            # only a control token parts texts so that each may be tokenised by itself
            if rest and tokenizer.is_control(rest[0]):
                return rest
        wanted = encode_chat(tokenizer, self._template, messages)
        common = 0
        for have, want in zip(self._session.tokens, wanted, strict=False):
            if have != want:
                break
            common += 1
        # one token at least must be read, for the logits after it
        kept = self._session.truncate(min(common, len(wanted) - 1))
        return wanted[kept:]


def _after(spans: Sequence[Span], n: int) -> list[Span]:
    """The spans without their first n characters."""
    rest = []
    for span in spans:
        if n < len(span.text):
            rest.append(Span(span.text[n:], span.is_user))
        n = max(n - len(span.text), 0)
    return rest
