"""The tokenizer: text to ids and back, whichever algorithm the vocabulary is for.

Source: llama.cpp src/llama-vocab.cpp, llama_vocab::impl::tokenize and token_to_piece.
"""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pykv.errors import TokenizerError
from pykv.tokenizer.special import Partition, Range, Special
from pykv.tokenizer.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocab

_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TEXT = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


class Span(NamedTuple):
    """A piece of a rendered conversation; is_user marks text that came from a message."""

    text: str
    is_user: bool


class Algorithm(Protocol):
    """What the kinds of vocabulary differ in."""

    def encode(self, data: bytes, *, after_special: bool) -> list[int]:
        """A stretch without special tokens -> ids."""

    def text(self, token: bytes) -> bytes:
        """The bytes that a normal token stands for."""


class StreamDecoder:
    """Ids in, text out, one at a time; never splits a UTF-8 character."""

    def __init__(self, tokenizer: "Tokenizer", special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is certain once this token is known; may be empty."""
        return self._decoder.decode(self._tokenizer.piece(token, special=self._special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """One vocabulary: encode, decode, and what its special tokens are."""

    def __init__(
        self,
        vocab: Vocab,
        algorithm: Algorithm,
        *,
        eats_left: frozenset[int] = frozenset(),
        eats_right: frozenset[int] = frozenset(),
        closing: int | None = None,
    ) -> None:
        """Tokens in eats_* swallow blanks; closing ends every special encoding (BERT's [SEP])."""
        self._vocab, self._algorithm, self._closing = vocab, algorithm, closing
        self._decoded: dict[int, bytes] = {}
        matched = (CONTROL, UNKNOWN, USER_DEFINED)
        self._specials = {
            i: Special(
                text=vocab.tokens[i],
                id=i,
                guarded=t != USER_DEFINED,
                eats_left=i in eats_left,
                eats_right=i in eats_right,
            )
            for i, t in enumerate(vocab.types)
            if t in matched
        }
        self._partition = Partition(list(self._specials.values()))
        # in a conversation these are structure, although a plain text may spell them
        self._chat_partition = self._partition
        if vocab.structural:
            self._chat_partition = Partition(
                [
                    s if s.id not in vocab.structural else Special(s.text, s.id, guarded=True)
                    for s in self._specials.values()
                ]
            )

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return self._vocab.n_vocab

    @property
    def bos(self) -> int | None:
        """The id that begins a text."""
        return self._vocab.special.get("bos")

    @property
    def eos(self) -> int | None:
        """The id that ends a text."""
        return self._vocab.special.get("eos")

    @property
    def unk(self) -> int | None:
        """The id that stands for what the vocabulary cannot spell."""
        return self._vocab.special.get("unknown")

    @property
    def add_bos(self) -> bool:
        """Whether `encode` with add_special begins with bos."""
        return self._vocab.add_bos

    @property
    def add_eos(self) -> bool:
        """Whether `encode` with add_special ends with eos."""
        return self._vocab.add_eos

    @property
    def eog(self) -> frozenset[int]:
        """All ids that end a generation."""
        return self._vocab.eog

    @property
    def suppress(self) -> tuple[int, ...]:
        """Ids that must never be sampled."""
        return self._vocab.suppress

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it, not what it prints.  Raises as `piece`."""
        return self._vocab.tokens[self._check(token)].decode("utf-8", errors="replace")

    def is_control(self, token: int) -> bool:
        """Whether the token steers the model and prints nothing.  Raises as `piece`."""
        return self._vocab.types[self._check(token)] == CONTROL

    def encode(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Text -> ids.

        Control tokens spelled in the text become ids only with parse_special; leave it off for
        text that is not trusted. Bytes need not be UTF-8; a lone surrogate becomes U+FFFD.
        """
        data = text if isinstance(text, bytes) else _utf8(text)
        parts = self._partition.split(data, guarded=parse_special)
        return self._ids(data, parts, add_special)

    def encode_spans(self, spans: Iterable[Span], *, add_special: bool = True) -> list[int]:
        """The joined spans -> ids; no control token is matched where it touches a user span.

        All else is as if the whole text were encoded with parse_special, so merges run on
        across the seams.
        """
        chunks: list[bytes] = []
        user: list[Range] = []
        at = 0
        for span in spans:
            chunk = _utf8(span.text)
            chunks.append(chunk)
            if span.is_user and chunk:
                user.append((at, at + len(chunk)))
            at += len(chunk)
        data = b"".join(chunks)
        return self._ids(
            data, self._chat_partition.split(data, guarded=True, user=user), add_special
        )

    def controls_in(self, text: str) -> list[str]:
        """Texts of control tokens that are spelled in the text, longest first."""
        found = self._chat_partition.present(_utf8(text), guarded=True)
        return [s.text.decode("utf-8", errors="replace") for s in found if s.guarded]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Ids -> text; bytes that are not UTF-8 become U+FFFD.  Raises as `piece`."""
        return self.decode_bytes(ids, special=special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """Ids -> bytes, exactly as the tokens spell them.  Raises as `piece`."""
        return b"".join([self.piece(i, special=special) for i in ids])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that one token prints; control tokens print nothing unless special.

        Raises TokenizerError: no such token.
        """
        data = self._decoded.get(token)
        if data is None:
            data = self._decoded[token] = self._print(self._check(token))
        if special or self._vocab.types[token] not in (CONTROL, UNKNOWN):
            return data
        return b""

    def stream(self, *, special: bool = False) -> StreamDecoder:
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self, special)

    def _print(self, token: int) -> bytes:
        text, kind = self._vocab.tokens[token], self._vocab.types[token]
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            return text
        if kind == NORMAL:
            return self._algorithm.text(text)
        if kind == BYTE:
            match = _BYTE_TEXT.fullmatch(text)
            return bytes([int(match[1], 16)]) if match else text
        return b""

    def _check(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise TokenizerError(
                f"{self._vocab.where}: there is no token {token}; ids run from 0 to "
                f"{self.n_vocab - 1}"
            )
        return token

    def _ids(self, data: bytes, parts: Sequence[Range | int], add_special: bool) -> list[int]:
        special: Mapping[str, int] = self._vocab.special
        out: list[int] = [special["bos"]] if add_special and self.add_bos else []
        after_special = True
        for part in parts:
            if isinstance(part, int):
                out.append(part)
                after_special = True
            else:
                chunk = data[part[0] : part[1]]
                out += self._algorithm.encode(chunk, after_special=after_special)
                after_special = False
        if add_special and self.add_eos:
            out.append(special["eos"])
        if add_special and self._closing is not None:
            out.append(self._closing)
        return out


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text).encode()
