"""From a model file's metadata to its tokenizer.

Source: llama.cpp src/llama-vocab.cpp, llama_vocab::impl::load.
"""

import logging
from collections.abc import Mapping

from pykv.errors import TokenizerError, UnsupportedError
from pykv.tokenizer.base import Algorithm, Tokenizer
from pykv.tokenizer.pretok import PRE_TOKENIZERS, PreTokenizer
from pykv.tokenizer.vocab import (
    CONTROL,
    DEFAULT_IDS,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    Vocab,
    flag,
    model_name,
    read_vocab,
)

LOG = logging.getLogger(__name__)
MASK_EATS_LEFT_PRE = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
MASK_EATS_LEFT_ARCH = ("nomic-bert-moe", "jina-bert-v3")


def from_metadata(metadata: Mapping[str, object], *, where: str) -> Tokenizer:
    """The tokenizer that the metadata describe; `where` names the file in errors.

    Raises TokenizerError: a broken vocabulary or an unknown pre-tokenizer.
    Raises UnsupportedError: a kind of vocabulary that pykv has no algorithm for.
    """
    model = model_name(metadata, where)
    if model == "llama":
        return _spm(metadata, where)
    if model in ("gpt2", "gemma4"):
        return _bpe(metadata, model, where)
    if model == "bert":
        return _wpm(metadata, where)
    raise UnsupportedError(
        f"{where}: vocabularies of the kind {model!r} are not supported; use a model with one of "
        f"{', '.join(sorted(DEFAULT_IDS))}"
    )


def _spm(metadata: Mapping[str, object], where: str) -> Tokenizer:
    # imported here, so that a run loads the one library that its model needs
    from pykv.tokenizer.spm import SPM

    vocab = read_vocab(metadata, where, add_bos=True, add_eos=False)
    prefix = flag(metadata, "add_space_prefix", True)
    return _tokenizer(metadata, vocab, SPM(vocab, add_space_prefix=prefix))


def _bpe(metadata: Mapping[str, object], model: str, where: str) -> Tokenizer:
    from pykv.tokenizer.bpe import BPE, read_merges

    pre = _pre_tokenizer(metadata, model, where)
    vocab = read_vocab(metadata, where, add_bos=pre.add_bos, add_eos=False)
    return _tokenizer(metadata, vocab, BPE(vocab, read_merges(metadata, where), pre))


def _wpm(metadata: Mapping[str, object], where: str) -> Tokenizer:
    from pykv.tokenizer.wpm import WPM

    # such a text stands between bos ([CLS]) and the separator, whatever the flags say
    always = dict(metadata) | {PREFIX + "add_bos_token": True}
    vocab = read_vocab(always, where, add_bos=True, add_eos=False)
    lowercase = flag(metadata, "normalizer.lowercase", True)
    strip = flag(metadata, "normalizer.strip_accents", lowercase)
    algorithm = WPM(vocab, lowercase=lowercase, strip_accents=strip)
    return _tokenizer(metadata, vocab, algorithm, closing=vocab.special.get("seperator"))


def _pre_tokenizer(metadata: Mapping[str, object], model: str, where: str) -> PreTokenizer:
    name = "gemma4" if model == "gemma4" else metadata.get(PREFIX + "pre")
    if not name:
        LOG.warning(
            "%s: %spre is missing, so the text is cut in the default way, which may not be the "
            "model's own; convert the model again",
            *(where, PREFIX),
        )
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{where}: {PREFIX}pre is {name!r}, a pre-tokenizer that this pykv does not know; "
            f"a newer version may (known: {', '.join(sorted(PRE_TOKENIZERS))})"
        )
    return PRE_TOKENIZERS[name]


def _tokenizer(
    metadata: Mapping[str, object],
    vocab: Vocab,
    algorithm: Algorithm,
    closing: int | None = None,
) -> Tokenizer:
    """Joins the parts, with the blanks that some models' special tokens swallow."""
    name = str(metadata.get("general.name", "")).lower()
    arch = str(metadata.get("general.architecture", ""))
    pre = str(metadata.get(PREFIX + "pre", ""))
    left: set[int] = set()
    right: set[int] = set()
    if any(x in pre for x in MASK_EATS_LEFT_PRE) or any(x in arch for x in MASK_EATS_LEFT_ARCH):
        left = {vocab.ids[t] for t in (b"<mask>",) if t in vocab.ids}
    elif "phi-3" in name or "phi3" in name:
        matched = (CONTROL, UNKNOWN, USER_DEFINED)
        right = {i for i, t in enumerate(vocab.types) if t in matched}
        right -= {vocab.ids.get(t, -1) for t in (b"<unk>", b"<s>", b"<|endoftext|>")}
    elif "modern-bert" in name:
        left = {vocab.ids[t] for t in (b"[MASK]",) if t in vocab.ids}
    return Tokenizer(
        vocab,
        algorithm,
        eats_left=frozenset(left),
        eats_right=frozenset(right),
        closing=closing,
    )
