"""A conversation: messages on one side, a cached sequence on the other.

Each turn is computed on a fork, which costs at most a partly filled page, and counts once its
prompt was read; until then the conversation is as it was. The state before each turn is kept, for
`undo` and `retry`. Under a policy by head, which forbids forks, a turn goes on in the sequence
itself, and going back reads the conversation again. After a turn only the new text is read: the
rendering so far, plus the answer as it was generated, must be a prefix of the new rendering. Where
a template rewrites the past it is not, and the longest common run of tokens is kept instead.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pykv.config import LoadConfig
from pykv.engine.session import Generation, Session
from pykv.engine.stats import Stats
from pykv.errors import ConfigError, TemplateError
from pykv.tokenizer import ChatTemplate, Span, encode_chat

if TYPE_CHECKING:
    from pykv.engine.model import Model


@dataclass
class _State:
    """The conversation at one point, and what the cache holds of it."""

    session: Session
    messages: list[dict[str, str]]
    text: str | None = None  # what the tokens are, rendered; None: not known exactly
    unread: list[int] = field(default_factory=list)  # the last of the text, not yet in the cache


class Chat:
    """A conversation with a model.  `messages` are dicts of `role` and `content`.

    One answer at a time: whatever changes the conversation closes an answer that still runs.
    """

    def __init__(self, model: Model, template: ChatTemplate, system: str | None) -> None:
        self._model, self._template = model, template
        self.stats: Stats | None = None
        self._now = _State(Session(model), [])
        self._turns: list[_State] = []  # the states before each turn
        self._running: Callable[[], Generation | None] = lambda: None
        self.set_system(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said so far, the system message first."""
        return list(self._now.messages)

    def set_system(self, text: str | None) -> None:
        """Set the system message, or remove it; the next answer reads the conversation anew."""
        self._stop_running()
        first = [{"role": "system", "content": text}] if text else []
        for state in [*self._turns, self._now]:
            state.messages = first + [m for m in state.messages if m["role"] != "system"]
            state.text = None

    def clear(self) -> None:
        """Forget the conversation; the system message stays."""
        self._stop_running()
        for state in [*self._turns, self._now]:
            state.session.free()
        system = [m for m in self._now.messages if m["role"] == "system"]
        self._turns, self._now = [], _State(Session(self._model), system)

    def undo(self) -> bool:
        """Take back the last message and its answer.  False: there is none."""
        self._stop_running()
        if not self._turns:
            return False
        self._now.session.free()
        self._now = self._turns.pop()
        return True

    def retry(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Generation:
        """Answer the last message again.  Raises ConfigError: there is none."""
        self._stop_running()
        if not self._turns:
            raise ConfigError("there is no message to answer again")
        said = [m["content"] for m in self._now.messages if m["role"] == "user"]
        return self._answer(self._turns[-1], said[-1], max_tokens, stop)

    def send(
        self, text: str, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Generation:
        """Say something; the answer streams from the result.

        The turn counts once its prompt was read. Raises TemplateError: the template refuses it;
        while iterating, CacheFullError: the conversation does not fit the context.
        """
        self._stop_running()
        return self._answer(self._now, text, max_tokens, stop)

    def _stop_running(self) -> None:
        generation = self._running()
        if generation is not None:
            generation.close()

    def _answer(
        self, base: _State, said: str, max_tokens: int | None, stop: Sequence[str]
    ) -> Generation:
        """An answer to `said` after `base`, which is the present state or the one before it."""
        messages = [*base.messages, {"role": "user", "content": said}]
        controls = self._model.tokenizer.controls_in
        spans = self._template.render(messages, add_generation_prompt=True, controls=controls)
        rendered = "".join(s.text for s in spans)
        wanted, model = self._wanted(base, messages, spans, rendered), self._model

        def start() -> tuple[Session, list[int]]:
            session = base.session.fork() if model.store.forks else _taken(model, base)
            # one token at least must be read, for the logits after it
            kept = session.truncate(min(_common(session.tokens, wanted), len(wanted) - 1))
            return session, wanted[kept:]

        def end(generation: Generation) -> None:
            self.stats = generation.stats
            session = generation.session
            if session is None or not generation.prompt_read:
                if session is not None:
                    session.free()
                return
            if base is self._now:
                self._turns.append(base)
            else:  # a second answer takes the place of the first
                self._now.session.free()
            answer = {"role": "assistant", "content": generation.text}
            self._now = _State(session, [*messages, answer])
            # a stop string is no part of the answer, but among its tokens
            if self._model.tokenizer.decode(generation.tokens) == generation.text:
                n_read = len(session) - generation.stats.prompt_tokens
                self._now.text = rendered + generation.text
                self._now.unread = generation.tokens[n_read:]

        generation = Generation(
            self._model, start, self._model.sampler(), max_tokens=max_tokens, stop=stop, on_end=end
        )
        self._running = weakref.ref(generation)
        return generation

    def _wanted(
        self, base: _State, messages: list[dict[str, str]], spans: list[Span], rendered: str
    ) -> list[int]:
        """The tokens of the rendering; what was generated stays as it was generated."""
        tokenizer = self._model.tokenizer
        if base.text is not None and rendered.startswith(base.text):
            rest = tokenizer.encode_spans(_after(spans, len(base.text)), add_special=False)
            # only a control token parts texts so that each may be tokenised by itself
            if rest and tokenizer.is_control(rest[0]):
                return base.session.tokens + base.unread + rest
        return encode_chat(tokenizer, self._template, messages)


def _taken(model: Model, base: _State) -> Session:
    """A state's session itself, where it cannot be forked: back there all is read again."""
    session, base.session = base.session, Session(model)
    base.text, base.unread = None, []
    return session


def given_template(config: LoadConfig) -> str | None:
    """The template that replaces the model's: a name, a source or a file's text.

    Raises TemplateError: the file cannot be read.
    """
    given = config.chat_template
    if given is None or not os.path.isfile(given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{given}: the template cannot be read: {error}") from error


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _after(spans: Sequence[Span], n: int) -> list[Span]:
    """The spans without their first n characters."""
    rest = []
    for span in spans:
        if n < len(span.text):
            rest.append(Span(span.text[n:], span.is_user))
        n = max(n - len(span.text), 0)
    return rest
