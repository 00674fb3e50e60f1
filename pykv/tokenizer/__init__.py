"""Text to token ids and back, and chat templates: metadata in, ids out; no file is opened."""

from pykv.tokenizer.base import Span, StreamDecoder, Tokenizer
from pykv.tokenizer.metadata import from_metadata
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
