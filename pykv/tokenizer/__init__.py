"""Text to token ids and back, and chat templates: metadata in, ids out; no file is opened."""

from typing import TYPE_CHECKING

from pykv.tokenizer.base import Span, StreamDecoder, Tokenizer
from pykv.tokenizer.metadata import from_metadata

if TYPE_CHECKING:
    from pykv.tokenizer.template import ChatTemplate, encode_chat, select
    from pykv.tokenizer.template_builtin import BUILTIN

load = from_metadata

__all__ = [
    "BUILTIN",
    "ChatTemplate",
    "Span",
    "StreamDecoder",
    "Tokenizer",
    "encode_chat",
    "from_metadata",
    "load",
    "select",
]


def __getattr__(name: str) -> object:
    """The names that need Jinja, which a run without a conversation never loads (PEP 562)."""
    if name == "BUILTIN":
        from pykv.tokenizer.template_builtin import BUILTIN

        return BUILTIN
    if name in ("ChatTemplate", "encode_chat", "select"):
        from pykv.tokenizer import template

        return getattr(template, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
