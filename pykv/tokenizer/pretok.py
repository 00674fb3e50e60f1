"""How byte-level BPE cuts a text into words before it merges: one table by tokenizer.ggml.pre.

A family is an ordered list of patterns: each cuts every piece that the one before left, into its
matches and the gaps between them. They are in the syntax that Oniguruma (the `tokenizers`
library) and Python's `regex` share, in the models' own form, not in the ASCII approximations
that llama.cpp has of some of them.
Source: llama.cpp src/llama-vocab.cpp, llm_tokenizer_bpe and llama_vocab::impl::load.
"""

from dataclasses import dataclass

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
OTHER = r" ?[^\s\p{L}\p{N}]+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
KANA_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# without a bound, a run of digits would cost its length squared; groups are right up to 300 digits
DIGIT_GROUPS = r"(?:\d{3}){0,100}"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+|" + OTHER + r"|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{OTHER}[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{OTHER}[\r\n]*|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased(upper: str, lower: str, suffix: str) -> str:
    """Words cut where a capital follows a small letter."""
    return f"{HEAD}{upper}*{lower}+{suffix}|{HEAD}{upper}+{lower}*{suffix}"


CASED = _cased(UPPER, LOWER, CONTRACTION + "?")
GPT4O = rf"{CASED}|\p{{N}}{{1,3}}|{OTHER}[\r\n/]*|{SPACES}"
TEKKEN = rf"{_cased(UPPER, LOWER, '')}|\p{{N}}|{OTHER}[\r\n/]*|{SPACES}"
NOT_HAN = r"(?:(?!\p{Han})%s)"
KIMI = _cased(NOT_HAN % UPPER, NOT_HAN % LOWER, CONTRACTION + "?")
MARKED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
FEW_STOPS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
NEWLINES = r"[^\n]+|\n+"

FAMILIES: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt2": (GPT2,),
    "digit": (r"\p{N}", GPT2),
    "llama3": (LLAMA3,),
    "qwen2": (QWEN2,),
    "qwen35": (
        rf"{CONTRACTION}|{HEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",
    ),
    "gpt4o": (GPT4O,),
    "tekken": (TEKKEN,),
    "deepseek3": (r"\p{N}{1,3}", KANA_HAN, rf"{MARKED}[\r\n]*|{SPACES}"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"),
    "bloom": (FEW_STOPS,),
    "viking": (FEW_STOPS, r"\p{N}"),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ),
    "jais2": (
        rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{OTHER}[\r\n]*|\s*[\r\n]+|"
        + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s",
    ),
    "tiny-aya": (rf"\d{{1,3}}(?={DIGIT_GROUPS}\b)", GPT4O),
    "superbpe": (r"\p{N}+", r"(?=(?:\d{3}){1,100}(?!\d))"),
    "bailingmoe": (
        r"'(?i:[sdmt]|ll|ve|re)|" + rf"{WORD}|\p{{N}}|{OTHER}[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": (rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",),
    "ufakzeka": (rf"{WORD}|\p{{N}}|{OTHER}[\r\n]*|{SPACES}",),
    "afmoe": (
        r"\p{N}{1,3}(?=(?:\p{N}{3}){0,100}(?!\p{N}))",
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
        "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
        "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        rf"{MARKED}[\r\n]*|{SPACES}",
    ),
    "laguna": (NEWLINES, QWEN2),
    "exaone-moe": (
        rf"{CONTRACTION}|{HEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"|{OTHER}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "minicpm5": (
        r"\p{N}{1,3}",
        rf"{CONTRACTION}|{WORD}|\p{{N}}+|{OTHER}[\r\n]*|{SPACES}",
    ),
    "spark2.5": (
        r"\p{N}{1,3}",
        KANA_HAN,
        rf"{MARKED}|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    "youtu": (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a"
        f"\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{KANA_HAN}",
        rf"{CASED}|\p{{N}}|{OTHER}[\r\n/]*|{SPACES}",
    ),
    "kimi-k2": (rf"\p{{Han}}+|{KIMI}|\p{{N}}{{1,3}}|{OTHER}[\r\n]*|{SPACES}",),
    "newlines": (NEWLINES,),
}


@dataclass(frozen=True)
class PreTokenizer:
    """What one value of tokenizer.ggml.pre stands for."""

    family: str
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False
    byte_level: bool = True  # False: merges run on UTF-8 itself, spaces written as U+2581

    @property
    def patterns(self) -> tuple[str, ...]:
        """The family's patterns, in the order in which they apply."""
        return FAMILIES[self.family]


def _names(family: str, names: str, **flags: bool) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(family, **flags))


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_names("default", "default"),
    **_names(
        "gpt2",
        "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling modern-bert mellum gigachat "
        "a.x-4.0 jina-es jina-de jina-v2-es jina-v2-de roberta-bpe jina-v1-en jina-v2-code",
    ),
    **_names("digit", "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    **_names(
        "llama3",
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        ignore_merges=True,
        add_bos=True,
    ),
    **_names("llama3", "dbrx smaug-bpe chatglm-bpe"),
    **_names("llama3", "glm4 glm5", ignore_merges=True),
    **_names(
        "qwen2",
        "qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2",
    ),
    **_names("qwen35", "qwen35"),
    **_names("gpt4o", "gpt-4o llama4 kanana2 talkie minimax-m2"),
    **_names("gpt4o", "granite-embed-multi-97m", ignore_merges=True),
    **_names("tekken", "tekken", ignore_merges=True, add_bos=True),
    **_names("deepseek3", "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    **_names("deepseek-llm", "deepseek-llm"),
    **_names("deepseek-coder", "deepseek-coder"),
    **_names("falcon", "falcon"),
    **_names("bloom", "bloom poro-chat gpt3-finnish"),
    **_names("viking", "viking"),
    **_names("chameleon", "chameleon", add_bos=True),
    **_names("jais2", "jais-2"),
    **_names("tiny-aya", "tiny_aya cohere2moe"),
    **_names("superbpe", "superbpe"),
    **_names("bailingmoe", "bailingmoe bailingmoe2 llada-moe"),
    **_names("seed-coder", "seed-coder"),
    **_names("ufakzeka", "ufakzeka"),
    **_names("afmoe", "afmoe"),
    **_names("laguna", "laguna"),
    **_names("exaone-moe", "exaone-moe"),
    **_names("minicpm5", "minicpm5", ignore_merges=True),
    **_names("spark2.5", "spark2_5"),
    **_names("youtu", "youtu", ignore_merges=True),
    **_names("kimi-k2", "kimi-k2"),
    **_names("newlines", "gemma4 granite-embed-multi-311m", add_bos=True, byte_level=False),
    **_names("newlines", "sarvam-moe", byte_level=False),
}
