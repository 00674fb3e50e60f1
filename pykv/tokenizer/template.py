"""Chat templates: a conversation to the text that the model was trained on, then to ids.

What a message says and what the template puts around it are told apart, so that a control token
spelled in a message stays text. The template is rendered a second time with private characters
around every text of the messages. Where it looks into these texts (to drop a model's thoughts,
say) so that the marks get lost, only the control tokens spelled in them are marked instead.
Source: llama.cpp common/chat.cpp, common_chat_templates_apply_jinja.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property

import jinja2

from pykv.errors import TemplateError
from pykv.tokenizer.base import Span, Tokenizer
from pykv.tokenizer.sandbox import Budget, BudgetError, Sandbox
from pykv.tokenizer.template_builtin import BUILTIN
from pykv.tokenizer.vocab import model_name, special_ids, token_texts

Message = Mapping[str, object]
NOT_SAID = frozenset({"role", "type"})  # fields of a message that a user does not write
PROBE = "pykv7probe"
# what a template can raise: Python's own errors come out of the expressions in it
FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(MemoryError, NotImplementedError, RecursionError, TypeError, ValueError),
)
SUGGESTION = f"use --chat-template NAME|FILE (built in: {', '.join(sorted(BUILTIN))})"


class ChatTemplate:
    """One Jinja template; rendering is safe from several threads, one at a time."""

    def __init__(self, source: str, *, bos: str, eos: str, where: str) -> None:
        """`bos` and `eos` are token texts, or empty; `where` names the file in errors.

        Raises TemplateError: a syntax error.
        """
        self.source, self.bos, self.eos, self._where = source, bos, eos, where
        self._lock = threading.Lock()
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.load(source)
        except jinja2.TemplateSyntaxError as e:
            raise TemplateError(
                f"{where}: the chat template has an error in line {e.lineno}: {_sentence(e)}; "
                f"{SUGGESTION}"
            ) from e
        except FAILURES as e:
            raise TemplateError(
                f"{where}: the chat template cannot be compiled: {_sentence(e)}; {SUGGESTION}"
            ) from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        controls: Callable[[str], list[str]] | None = None,
        **variables: object,
    ) -> list[Span]:
        """Messages -> spans, whose texts joined are the prompt.

        `controls` finds the control tokens spelled in a text (`Tokenizer.controls_in`); it
        matters for templates that look into the messages.
        Raises TemplateError: the template refuses the conversation or fails.
        """
        given = self._prepared(messages)
        turn = {"add_generation_prompt": True} if add_generation_prompt else {}
        variables = {**turn, **variables}
        plain = self._render(given, variables)
        said = list(_texts(given))
        opened, closed = _unused_characters(2, [self.source, plain, *said])
        marked = self._render(_map(given, lambda t: _wrap(t, opened, closed)), variables)
        spans = _between(marked, opened, closed)
        if spans is not None and "".join([s.text for s in spans]) == plain:
            return spans
        return self._render_veiled(given, variables, plain, controls)

    def _render_veiled(
        self,
        given: list[Message],
        variables: Mapping[str, object],
        plain: str,
        controls: Callable[[str], list[str]] | None,
    ) -> list[Span]:
        """As render, with characters of the messages replaced by private ones and put back."""
        said = set(_texts(given))
        if controls is None:
            # any text may hold one: hide all that a control token could be spelled with
            veiled = {c for t in said for c in t if not c.isspace() and c < "\u3000"}
            found = {t: sorted(veiled) for t in said}
        else:
            found = {t: controls(t) for t in said}
            veiled = {c[0] for texts in found.values() for c in texts}
        if not veiled:
            return [Span(plain, False)]
        private = _unused_characters(len(veiled), [self.source, plain, *said])
        veils = dict(zip(sorted(veiled), private, strict=True))

        def veil(text: str) -> str:
            for hidden in found[text]:
                text = text.replace(hidden, veils[hidden[0]] + hidden[1:])
            return text

        unveiled = {v: c for c, v in veils.items()}
        out = self._render(_map(given, veil), variables)
        return _merged([Span(unveiled.get(c, c), c in unveiled) for c in out])

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as this template wants them: its kinds of content, and its roles."""
        out: list[dict[str, object]] = []
        system = ""
        for message in messages:
            role, text = message.get("role"), _text(message.get("content"))
            if role == "developer" and "<|channel|>" not in self.source:
                role = "system"
            if role == "system" and not self._shape[0]:
                system += text + "\n"
                continue
            out.append({**message, "role": role, "content": system + text})
            system = ""
        if system:
            out.append({"role": "user", "content": system.removesuffix("\n")})
        if self._shape[1]:
            return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in out]
        return [*out]

    @cached_property
    def _shape(self) -> tuple[bool, bool]:
        """Whether the template has a system role, and whether it wants lists of content parts."""
        user: Message = {"role": "user", "content": PROBE}
        parts: Message = {"role": "user", "content": [{"type": "text", "text": PROBE}]}
        typed = not self._shows([user]) and self._shows([parts])
        system: Message = {"role": "system", "content": PROBE}
        other: Message = {"role": "user", "content": "x"}
        if typed:
            system = {"role": "system", "content": [{"type": "text", "text": PROBE}]}
            other = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        return self._shows([system, other]), typed

    def _shows(self, messages: list[Message]) -> bool:
        try:
            return PROBE in self._render(messages, {"add_generation_prompt": True})
        except TemplateError as e:
            if isinstance(e.__cause__, BudgetError):
                raise
            return False

    def _render(self, messages: list[Message], variables: Mapping[str, object]) -> str:
        today = datetime.now()
        context = {
            "bos_token": self.bos,
            "eos_token": self.eos,
            "enable_thinking": True,
            "datetime": today.strftime("%b %d %Y"),
            "date_string": today.strftime("%d %b %Y"),
            **variables,
            "messages": messages,
        }
        with self._lock:
            budget = self._sandbox.budget = Budget(sum(map(len, _texts(messages))))
            chunks: list[str] = []
            length = 0
            try:
                for chunk in self._template.generate(context):
                    length += len(chunk)
                    budget.may_make(length)
                    chunks.append(chunk)
            except FAILURES as e:
                raise TemplateError(
                    f"{self._where}: the chat template refuses the conversation: {_sentence(e)}"
                ) from e
        return "".join(chunks)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    **variables: object,
) -> list[int]:
    """Messages -> ids: one bos if the vocabulary wants it, control tokens by the template only.

    Raises TemplateError: as `ChatTemplate.render`.
    """
    spans = template.render(
        messages,
        add_generation_prompt=add_generation_prompt,
        controls=tokenizer.controls_in,
        **variables,
    )
    # the tokenizer adds these itself
    while tokenizer.add_bos and template.bos and spans and not spans[0].is_user:
        if not spans[0].text.startswith(template.bos):
            break
        spans[0] = Span(spans[0].text.removeprefix(template.bos), False)
    if tokenizer.add_eos and template.eos and spans and not spans[-1].is_user:
        spans[-1] = Span(spans[-1].text.removesuffix(template.eos), False)
    return tokenizer.encode_spans(spans, add_special=True)


def select(metadata: Mapping[str, object], override: str | None, where: str) -> ChatTemplate:
    """The template to use: override (a built-in name, or Jinja source), or the model's own.

    Raises TemplateError: there is none, or it has a syntax error.
    Raises TokenizerError: the metadata hold no vocabulary.
    """
    source = BUILTIN.get(override, override) if override is not None else None
    if source is not None and not any(x in source for x in ("{{", "{%", "\n")):
        raise TemplateError(f"{where}: there is no chat template named {source!r}; {SUGGESTION}")
    if source is None:
        source = _own_source(metadata)
    if source is None:
        raise TemplateError(f"{where}: the model has no chat template; {SUGGESTION}")
    tokens = token_texts(metadata, where)
    ids = special_ids(metadata, model_name(metadata, where), len(tokens), where)
    bos, eos = (
        tokens[ids[k]].decode("utf-8", errors="replace") if k in ids else "" for k in ("bos", "eos")
    )
    return ChatTemplate(source, bos=bos, eos=eos, where=where)


def _own_source(metadata: Mapping[str, object]) -> str | None:
    own = metadata.get("tokenizer.chat_template")
    if isinstance(own, str) and own and own != "chatml":
        return own
    variant = metadata.get("tokenizer.chat_template.tool_use")
    if isinstance(variant, str) and variant:
        return variant
    return BUILTIN["chatml"] if own == "chatml" else None


def _sentence(error: BaseException) -> str:
    """The error's message in one line."""
    return " ".join((str(error) or type(error).__name__).split())[:300]


def _text(content: object) -> str:
    """A message's content as one text: parts are joined by newlines, none is empty."""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, Mapping) else p for p in content]
        return "\n".join([p for p in parts if isinstance(p, str)])
    return content if isinstance(content, str) else ""


def _texts(value: object) -> Iterator[str]:
    """All texts in messages that a user may have written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            if k not in NOT_SAID:
                yield from _texts(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _texts(v)


def _map(messages: list[Message], change: Callable[[str], str]) -> list[Message]:
    """The messages with those texts changed."""

    def walk(value: object) -> object:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {k: v if k in NOT_SAID else walk(v) for k, v in value.items()}
        return [walk(v) for v in value] if isinstance(value, list | tuple) else value

    return [{k: v if k in NOT_SAID else walk(v) for k, v in m.items()} for m in messages]


def _wrap(text: str, opened: str, closed: str) -> str:
    """Marks inside the blanks at both ends, because templates trim."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{opened}{core}{closed}{text[start + len(core) :]}"


def _unused_characters(n: int, texts: Sequence[str]) -> list[str]:
    """Private-use characters that occur in none of the texts, and cannot be guessed."""
    used = set().union(*texts)
    out: set[str] = set()
    for _ in range(100 * (n + 10)):
        if len(out) == n:
            return list(out)
        c = chr(0xF0000 + secrets.randbelow(0x20000))
        # the last two code points of a plane are not characters
        if ord(c) & 0xFFFF < 0xFFFE and c not in used:
            out.add(c)
    raise TemplateError("the conversation uses up the private-use characters; leave some out")


def _between(text: str, opened: str, closed: str) -> list[Span] | None:
    """The text cut at the marks; None if they are not in pairs."""
    head, *rest = text.split(opened)
    spans = [Span(head, False)]
    if closed in head:
        return None
    for part in rest:
        inner, mark, outer = part.partition(closed)
        if not mark or closed in outer:
            return None
        spans += [Span(inner, True), Span(outer, False)]
    return [s for s in spans if s.text]


def _merged(spans: Sequence[Span]) -> list[Span]:
    out: list[Span] = []
    start = 0
    for i in range(1, len(spans) + 1):
        if i == len(spans) or spans[i].is_user != spans[start].is_user:
            out.append(Span("".join([s.text for s in spans[start:i]]), spans[start].is_user))
            start = i
    return out
