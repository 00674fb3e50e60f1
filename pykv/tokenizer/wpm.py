"""WPM: BERT's WordPiece, where each word is cut greedily into the longest tokens from the left.

Source: llama.cpp src/llama-vocab.cpp, llm_tokenizer_wpm_session.
"""

import unicodedata

from pykv.tokenizer.vocab import Vocab

WORD_START = "▁"
BLANKS = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    chr(c) for c in range(0x2000, 0x200B)
}
# the third last range starts where the Rust original has it, not where the Unicode block does
HAN = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


class WPM:
    """The algorithm of vocabularies whose model is "bert"."""

    def __init__(self, vocab: Vocab, *, lowercase: bool, strip_accents: bool) -> None:
        self._ids, self._unknown = vocab.ids, vocab.special.get("unknown")
        self._lowercase, self._strip = lowercase, strip_accents
        self._longest = max(map(len, vocab.tokens))

    def encode(self, data: bytes, *, after_special: bool) -> list[int]:
        """Bytes -> ids; a word that cannot be cut into tokens becomes the unknown token."""
        out: list[int] = []
        for word in self._words(data.decode("utf-8", errors="replace")):
            ids = self._cut((WORD_START + word).encode())
            if ids:
                out += ids
            elif self._unknown is not None:
                out.append(self._unknown)
        return out

    def text(self, token: bytes) -> bytes:
        """U+2581 stands for a space."""
        return token.replace(WORD_START.encode(), b" ")

    def _words(self, text: str) -> list[str]:
        if self._strip:
            text = unicodedata.normalize("NFD", text)
        words: list[str] = []
        word: list[str] = []
        for c in text:
            kind = unicodedata.category(c)
            if c in BLANKS:
                words.append("".join(word))
                word = []
            elif c in "\0\ufffd" or kind[0] == "C" or (self._strip and kind[0] == "M"):
                continue
            elif kind[0] == "P" or (c < "\x7f" and kind[0] == "S") or _is_han(c):
                words += ["".join(word), self._lower(c)]
                word = []
            else:
                word.append(self._lower(c))
        words.append("".join(word))
        return [w for w in words if w]

    def _lower(self, c: str) -> str:
        return c.lower() if self._lowercase else c

    def _cut(self, word: bytes) -> list[int]:
        out: list[int] = []
        at, n = 0, len(word)
        while at < n:
            for end in range(min(n, at + self._longest + 1), at, -1):
                found = self._ids.get(word[at:end])
                if found is not None:
                    out.append(found)
                    at = end
                    break
            else:
                return []
        return out


def _is_han(c: str) -> bool:
    return c >= "\u3400" and any(a <= ord(c) <= b for a, b in HAN)
