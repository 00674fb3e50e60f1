"""BPE: merges by rank inside words, on the GPT-2 byte alphabet or on UTF-8 itself.

The vocabulary and merges are handed to the `tokenizers` library in memory. It wants every merge
to give a token and drops what it cannot spell; entries after the last id stand in for what a
file lacks there, and are turned into llama.cpp's fallback afterwards. Control tokens are left
out, so that no merge and no whole word ever gives one.
Source: llama.cpp src/llama-vocab.cpp, llm_tokenizer_bpe_session; src/unicode.cpp,
unicode_byte_to_utf8_map.
"""

import re
from collections.abc import Iterator, Mapping

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE as Model
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelStep
from tokenizers.pre_tokenizers import Sequence, Split

from pykv.errors import TokenizerError
from pykv.tokenizer.pretok import PreTokenizer
from pykv.tokenizer.vocab import CONTROL, PREFIX, UNKNOWN, Vocab

SPACE = "▁"
_BAD = re.compile("[\ud800-\udfff]")
_RUNS = re.compile(r"[^\n]+|\n+")
# Oniguruma gives up on a match after ten million steps; a cut between two words of ASCII letters
# is a cut of every family but two (superbpe, exaone-moe), and only texts this long are cut
MAX_CHARS = 1 << 21
_SEAM = re.compile(r"[A-Za-z](?= [A-Za-z])")


def byte_alphabet() -> dict[str, int]:
    """Character -> the byte it stands for: itself if printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


ALPHABET = byte_alphabet()


def read_merges(metadata: Mapping[str, object], where: str) -> list[tuple[str, str]]:
    """Pairs by rank; a pair that comes twice keeps its first rank.

    Raises TokenizerError: no merges, or merges that are not UTF-8.
    """
    listed = metadata.get(PREFIX + "merges")
    if not isinstance(listed, list):
        raise TokenizerError(
            f"{where}: {PREFIX}merges is missing, without which a BPE vocabulary cannot be used; "
            "convert the model again"
        )
    try:
        texts = [m.decode() for m in listed]
    except (UnicodeDecodeError, AttributeError) as e:
        raise TokenizerError(
            f"{where}: {PREFIX}merges must be a list of UTF-8 texts; convert the model again"
        ) from e
    pairs = [(m[:i], m[i + 1 :]) for m in texts if (i := m.find(" ", 1)) > 0]
    return pairs if len(set(pairs)) == len(pairs) else list(dict.fromkeys(pairs))


class BPE:
    """The algorithm of vocabularies whose model is "gpt2" (byte level) or "gemma4"."""

    def __init__(self, vocab: Vocab, merges: list[tuple[str, str]], pre: PreTokenizer) -> None:
        self._n, self._byte_level = vocab.n_vocab, pre.byte_level
        table = _table(vocab)
        self._newlines = {t: i for t, i in table.items() if not t.strip("\n")}
        self._extra = self._stand_ins(vocab, table, merges)
        self._tokenizer = Tokenizer(
            Model(
                vocab=table,
                merges=merges,
                ignore_merges=pre.ignore_merges,
                byte_fallback=not pre.byte_level,
            )
        )
        if pre.byte_level:
            cuts = [Split(Regex(p), "isolated") for p in pre.patterns]
            self._tokenizer.pre_tokenizer = Sequence(
                [*cuts, ByteLevelStep(add_prefix_space=False, use_regex=False)]
            )

    def _stand_ins(
        self, vocab: Vocab, table: dict[str, int], merges: list[tuple[str, str]]
    ) -> dict[int, list[int]]:
        """Entries for what the library must know and the vocabulary lacks, added to table."""
        needed = {t for left, right in merges for t in (left, right, left + right)}
        needed |= ALPHABET.keys() if self._byte_level else set()
        extra: dict[int, list[int]] = {}
        for text in sorted(needed - table.keys()):
            i = self._n + len(extra)
            # llama.cpp looks single bytes up as they are, so that only ASCII is ever found
            names = text if self._byte_level else [f"<0x{b:02X}>" for b in text.encode()]
            extra[i] = [table[t] for t in names if t in table and table[t] < self._n]
            table[text] = i
        return extra

    def encode(self, data: bytes, *, after_special: bool) -> list[int]:
        """Bytes -> ids; each byte that is not UTF-8 is read as U+FFFD."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = _BAD.sub("\ufffd", data.decode("utf-8", errors="surrogateescape"))
        out: list[int] = []
        if self._byte_level:
            for chunk in _chunks(text):
                out += self._merge(chunk)
            return out
        for run in _RUNS.findall(text.replace(" ", SPACE)):
            whole = self._newlines.get(run)
            out += self._merge(run) if whole is None else [whole]
        return out

    def text(self, token: bytes) -> bytes:
        """Back through the byte alphabet; a text with other characters stands for itself."""
        if not self._byte_level:
            return token.replace(SPACE.encode(), b" ")
        try:
            return bytes([ALPHABET[c] for c in token.decode()])
        except (KeyError, UnicodeDecodeError):
            return token

    def _merge(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._extra or max(ids, default=0) < self._n:
            return ids
        return [j for i in ids for j in self._extra.get(i, [i])]


def _chunks(text: str) -> Iterator[str]:
    at = 0
    while len(text) - at > MAX_CHARS:
        seam = _SEAM.search(text, at + MAX_CHARS // 2, at + MAX_CHARS)
        end = seam.end() if seam else at + MAX_CHARS
        yield text[at:end]
        at = end
    yield text[at:]


def _table(vocab: Vocab) -> dict[str, int]:
    """Token text -> id, without control tokens and texts that are not UTF-8."""
    try:
        table = {t.decode(): i for t, i in vocab.ids.items()}
    except UnicodeDecodeError:
        table = {}
        for text, i in vocab.ids.items():
            decoded = text.decode("utf-8", errors="replace")
            if decoded.encode() == text:
                table[decoded] = i
    hidden = [i for i, t in enumerate(vocab.types) if t in (CONTROL, UNKNOWN)]
    for i in hidden:
        table.pop(vocab.tokens[i].decode("utf-8", errors="replace"), None)
    return table
