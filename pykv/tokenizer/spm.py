"""SPM: SentencePiece BPE, where the best-scored adjacent pair is merged first.

The vocabulary is handed to the sentencepiece library as a model written here by hand, with all
of its own text handling off, so that it merges and falls back to bytes, and does nothing else.
Control tokens are given to it as such: it never merges text into one, which llama.cpp would.
Source: llama.cpp src/llama-vocab.cpp, llm_tokenizer_spm_session; sentencepiece_model.proto.
"""

import re
import struct

import sentencepiece

from pykv.errors import TokenizerError
from pykv.tokenizer.vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocab

SPACE = "▁".encode()
P_NORMAL, P_UNKNOWN, P_CONTROL, P_BYTE = b"\x18\x01", b"\x18\x02", b"\x18\x03", b"\x18\x06"
# a stretch of UTF-8, or one symbol of llama.cpp's: its first byte says the length, unchecked
_SYMBOLS = re.compile(
    rb"((?:[\x00-\x7f]+|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})+)"
    rb"|[\x80-\xbf]|[\xc0-\xdf].?|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}",
    re.DOTALL,
)


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _field(number: int, body: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _heads(tokens: list[bytes]) -> dict[int, bytes]:
    """Text length -> the bytes before the text in a pieces field: tag, length, tag, length."""
    heads = {}
    for n in set(map(len, tokens)):
        inner = b"\x0a" + _varint(n)
        heads[n] = b"\x0a" + _varint(len(inner) + n + 5 + 2) + inner
    return heads


class SPM:
    """The algorithm of vocabularies whose model is "llama"."""

    def __init__(self, vocab: Vocab, *, add_space_prefix: bool) -> None:
        """Raises TokenizerError: sentencepiece refuses the vocabulary."""
        self._prefix = SPACE if add_space_prefix else b""
        self._n = vocab.n_vocab
        byte_texts = [b"<0x%02X>" % b for b in range(256)]
        self._bytes = [self._byte_ids(vocab, b, text) for b, text in enumerate(byte_texts)]
        missing = [t for t in byte_texts if t not in vocab.ids]
        self._extra = {self._n + i: self._bytes[int(t[3:5], 16)] for i, t in enumerate(missing)}
        try:
            self._model = sentencepiece.SentencePieceProcessor(
                model_proto=_proto(vocab, byte_texts, missing)
            )
        except RuntimeError as e:
            raise TokenizerError(
                f"{vocab.where}: sentencepiece cannot use the vocabulary ({e}); convert the "
                "model again"
            ) from e

    @staticmethod
    def _byte_ids(vocab: Vocab, byte: int, text: bytes) -> list[int]:
        for name in (text, bytes([byte])):
            if name in vocab.ids:
                return [vocab.ids[name]]
        return [vocab.special["unknown"]] if "unknown" in vocab.special else []

    def encode(self, data: bytes, *, after_special: bool) -> list[int]:
        """Bytes -> ids; a space goes before the text that begins the input or follows a special."""
        if after_special:
            data = self._prefix + data
        data = data.replace(b" ", SPACE)
        try:
            return self._merge(data.decode())
        except UnicodeDecodeError:
            pass
        out: list[int] = []
        for match in _SYMBOLS.finditer(data):
            if match[1] is not None:
                out += self._merge(match[1].decode())
            else:
                for byte in match[0]:
                    out += self._bytes[byte]
        return out

    def text(self, token: bytes) -> bytes:
        """U+2581 stands for a space."""
        return token.replace(SPACE, b" ")

    def _merge(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        if not self._extra or max(ids, default=0) < self._n:
            return ids
        return [j for i in ids for j in self._extra.get(i, [i])]


def _proto(vocab: Vocab, byte_texts: list[bytes], missing: list[bytes]) -> bytes:
    """The vocabulary as a serialised sentencepiece ModelProto.

    Byte tokens that the vocabulary lacks, and the one unknown piece that the library insists
    on, follow after the last id.
    """
    n = vocab.n_vocab
    scores = struct.pack(f"<{n}f", *(vocab.scores or [0.0] * n))
    # specials never reach the library, and must not come out of it
    kinds = {CONTROL: P_CONTROL, UNKNOWN: P_CONTROL, USER_DEFINED: P_CONTROL}
    types = [kinds.get(t, P_NORMAL) for t in vocab.types]
    for text in byte_texts:
        if text in vocab.ids:
            types[vocab.ids[text]] = P_BYTE
    heads = _heads(vocab.tokens)
    pieces = [
        b"%b%b\x15%b%b" % (heads[len(text)], text, score, kind)
        for text, (score,), kind in zip(
            vocab.tokens, struct.iter_unpack("4s", scores), types, strict=True
        )
    ]
    zero = b"\x15\0\0\0\0"
    pieces += [_field(1, _field(1, t) + zero + P_BYTE) for t in missing]
    unknown = b"<unknown>"
    while unknown in vocab.ids:
        unknown += b">"
    pieces.append(_field(1, _field(1, unknown) + zero + P_UNKNOWN))
    # model_type BPE, byte_fallback, and the name of the unknown piece
    trainer = b"\x18\x02" + _varint(35 << 3) + b"\x01" + _field(45, unknown)
    # identity; no dummy prefix, no removal of extra whitespace, no escaping
    normalizer = _field(1, b"identity") + b"\x18\x00\x20\x00\x28\x00"
    return b"".join([*pieces, _field(2, trainer), _field(3, normalizer)])
