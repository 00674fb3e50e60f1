"""The vocabulary of a model file: token texts, types, special ids, and what ends a generation.

Source: llama.cpp src/llama-vocab.cpp, llama_vocab::impl::load.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pykv.errors import TokenizerError

LOG = logging.getLogger(__name__)
PREFIX = "tokenizer.ggml."

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# model: ids that hold where the file names none
DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
# the second names are older spellings of the same key
ID_KEYS: dict[str, tuple[str, ...]] = {
    "bos": ("bos",),
    "eos": ("eos",),
    "eot": ("eot",),
    "eom": ("eom",),
    "unknown": ("unknown",),
    "seperator": ("seperator",),  # the format's own spelling
    "padding": ("padding",),
    "mask": ("mask",),
    "fim_pre": ("fim_pre", "prefix"),
    "fim_suf": ("fim_suf", "suffix"),
    "fim_mid": ("fim_mid", "middle"),
    "fim_pad": ("fim_pad",),
    "fim_rep": ("fim_rep",),
    "fim_sep": ("fim_sep",),
}
DEEPSEEK_EOS = "<｜end▁of▁sentence｜>"
# texts that stand for an id which the file does not name, in order of preference
ID_TEXTS: dict[str, tuple[str, ...]] = {
    "eot": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", DEEPSEEK_EOS, "<end_of_utterance>"),
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>"),
        *("▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>"),
        *("▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>"),
        *("▁<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
EOG_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *(DEEPSEEK_EOS, "[e~["),
)
ALWAYS_PRINTED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class Vocab:
    """Token texts and types by id, and the special ids; built by `read_vocab`, then only read."""

    where: str
    model: str
    tokens: list[bytes]
    types: list[int]
    scores: list[float] | None
    ids: dict[bytes, int]
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    eog: frozenset[int]
    structural: frozenset[int]  # control in the file, though printed like user-defined
    suppress: tuple[int, ...]

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


def model_name(metadata: Mapping[str, object], where: str) -> str:
    """The value of tokenizer.ggml.model.  Raises TokenizerError: absent or not a text."""
    name = metadata.get(PREFIX + "model")
    if not isinstance(name, str):
        raise TokenizerError(
            f"{where}: {PREFIX}model is missing, so the file holds no vocabulary that pykv can "
            "use; convert the model again with its tokenizer"
        )
    return name


def special_ids(
    metadata: Mapping[str, object], model: str, n_vocab: int, where: str
) -> dict[str, int]:
    """Special token ids by short name ("bos"); names without an id are absent."""
    found = {k: v for k, v in DEFAULT_IDS.get(model, {}).items() if v < n_vocab}
    for name, keys in ID_KEYS.items():
        for key in (f"{PREFIX}{k}_token_id" for k in keys):
            value = metadata.get(key)
            if value is None:
                continue
            if isinstance(value, int) and 0 <= value < n_vocab:
                found[name] = value
            else:
                LOG.warning(
                    "%s: %s is %r, outside of the %d tokens; keeping %s",
                    *(where, key, value, n_vocab, found.get(name, "none")),
                )
    no_bos = metadata.get(PREFIX + "pre") in ("chatglm-bpe", "glm4", "glm5")
    if no_bos and PREFIX + "bos_token_id" not in metadata:
        found.pop("bos", None)
    return found


def token_texts(metadata: Mapping[str, object], where: str) -> list[bytes]:
    """The token list, empty texts named.  Raises TokenizerError: absent, empty, or no texts."""
    tokens = metadata.get(PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], bytes):
        raise TokenizerError(
            f"{where}: {PREFIX}tokens must be a list of at least one text; convert the model again"
        )
    if b"" in tokens:
        tokens = [t or b"[EMPTY_%d]" % i for i, t in enumerate(tokens)]
    return tokens


def numbers(metadata: Mapping[str, object], key: str, n: int, where: str) -> list[float] | None:
    """The first n entries of a numeric array, or None.  Raises TokenizerError: shorter than n."""
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    tolist = getattr(value, "tolist", None)
    out = tolist() if tolist is not None else value
    if not isinstance(out, list) or len(out) < n:
        size = len(out) if isinstance(out, list) else "no"
        raise TokenizerError(
            f"{where}: {PREFIX}{key} has {size} entries where {n} tokens need one each; "
            "the file is damaged or was converted wrongly"
        )
    return out[:n]


def flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    """A boolean key of the tokenizer, or its default."""
    value = metadata.get(PREFIX + key)
    return default if value is None else bool(value)


def read_vocab(
    metadata: Mapping[str, object], where: str, *, add_bos: bool, add_eos: bool
) -> Vocab:
    """Metadata -> Vocab; add_bos and add_eos are what holds where the file does not say.

    Raises TokenizerError: no tokens, a text twice, or an array shorter than the tokens.
    """
    model = model_name(metadata, where)
    tokens = token_texts(metadata, where)
    n = len(tokens)
    ids = dict(zip(tokens, range(n), strict=True))
    if len(ids) != n:
        twice = next(t for i, t in enumerate(tokens) if ids[t] != i)
        raise TokenizerError(
            f"{where}: the token text {twice!r} occurs twice in the vocabulary, where texts must "
            "be unique; convert the model again"
        )
    raw_types = numbers(metadata, "token_type", n, where)
    types = [NORMAL] * n if raw_types is None else list(map(int, raw_types))
    special = special_ids(metadata, model, n, where)
    structural = {ids[t] for t in _known(ids, ALWAYS_PRINTED) if types[ids[t]] == CONTROL}
    eog = _end_of_generation(ids, types, special)
    return Vocab(
        where=where,
        model=model,
        tokens=tokens,
        types=types,
        scores=numbers(metadata, "scores", n, where),
        ids=ids,
        special=special,
        add_bos=_possible(special, "bos", flag(metadata, "add_bos_token", add_bos), where),
        add_eos=_possible(special, "eos", flag(metadata, "add_eos_token", add_eos), where),
        eog=eog,
        structural=frozenset(structural),
        suppress=_suppressed(metadata, n),
    )


def _known(ids: Mapping[bytes, int], texts: Iterable[str]) -> list[bytes]:
    return [t for t in (x.encode() for x in texts) if t in ids]


def _possible(special: Mapping[str, int], name: str, wanted: bool, where: str) -> bool:
    if wanted and name not in special:
        LOG.warning("%s: %sadd_%s_token is set but there is no such token", where, PREFIX, name)
        return False
    return wanted


def _suppressed(metadata: Mapping[str, object], n: int) -> tuple[int, ...]:
    value = metadata.get(PREFIX + "suppress_tokens")
    tolist = getattr(value, "tolist", None)
    listed = tolist() if tolist is not None else value
    return tuple(int(i) for i in listed if 0 <= i < n) if isinstance(listed, list) else ()


def _end_of_generation(
    ids: Mapping[bytes, int], types: list[int], special: dict[str, int]
) -> frozenset[int]:
    """Ids that end a generation; completes `special` and corrects `types` by token text."""
    for name, texts in ID_TEXTS.items():
        known = _known(ids, texts)
        if name not in special and known:
            special[name] = ids[known[0]]
            types[special[name]] = CONTROL
    by_text = {ids[t] for t in _known(ids, EOG_TEXTS)}
    for i in by_text:
        types[i] = CONTROL
    for t in _known(ids, ALWAYS_PRINTED):
        types[ids[t]] = USER_DEFINED
    names = ("fim_pad", "fim_rep", "fim_sep", "eos", "eot", "eom")
    eog = by_text | {special[k] for k in names if k in special}

    def has(*texts: str) -> bool:
        return any(ids.get(t.encode(), -1) in eog for t in texts)

    # gpt-oss and solar-open end a message with <|end|> and go on; they stop at the others
    if has("<|end|>") and has("<|call|>", "<|calls|>") and (has("<|return|>") or has("<|flush|>")):
        end = ids[b"<|end|>"]
        eog.discard(end)
        types[end] = USER_DEFINED
    if has("</s>") and has("<|tool_response>", "<|plamo:eos|>"):
        eog.discard(ids[b"</s>"])
        types[ids[b"</s>"]] = NORMAL
    return frozenset(eog)
