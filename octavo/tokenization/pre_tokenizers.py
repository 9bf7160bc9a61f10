r"""How each kind of byte-level BPE vocabulary cuts text into words before merging. Data only, keyed by GGUF's names.

A GGUF file names its kind in `tokenizer.ggml.pre`; the kind stands for the pre-tokenizer, the normalizer and two
defaults of the original tokenizer.json, which the file does not carry. Patterns are the published ones of those
tokenizer.json files (Oniguruma syntax). They are applied one after the other: a match and what lies between two matches
become pieces of their own, and the next pattern cuts those pieces further.
Kinds: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf_update.py
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BPEKind:
    """What a kind of byte-level BPE does beside its merges."""

    patterns: tuple[str, ...] = ()
    individual_digits: bool = False
    """Every digit is a piece of its own; applied after `patterns`."""
    gpt2_words: bool = False
    """GPT-2's own pattern comes last."""
    nfc: bool = False
    """Text is brought to Unicode normal form C first."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken as it is, whatever its merges give."""
    add_bos: bool = False
    """Used where the file has no `tokenizer.ggml.add_bos_token`."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-"
    "\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "一-龥ࠀ-一가-퟿"


def _words(letters: str = r"\p{L}", digits: str = r"\p{N}", contractions: str = f"{_CONTRACTIONS}|") -> str:
    """The cl100k family: contractions, words with one character before, digits, punctuation, white space."""
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{_PUNCTUATION}|{_SPACES}"


def _cased_words(suffix: str, digits: str) -> str:
    """The o200k family: words are also cut where lower case turns to upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2 = BPEKind(gpt2_words=True)
_STARCODER = BPEKind(individual_digits=True, gpt2_words=True)
_LLAMA3 = BPEKind((_words(digits=r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = BPEKind((_words(),), nfc=True)
_QWEN35 = BPEKind(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
)
_TEKKEN = BPEKind((_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True)
_GPT4O = BPEKind((_cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))
_DEEPSEEK_LLM = BPEKind(
    (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        rf"[{_CJK}]+",
    ),
    individual_digits=True,
)
_DEEPSEEK_CODER = BPEKind((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_CJK}]+"), individual_digits=True)
_DEEPSEEK_V3 = BPEKind(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_SEED_CODER = BPEKind(
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
)
_VIKING = BPEKind((r" ?[^(\s|.,!?…。，、।۔،)]+",), individual_digits=True)
_MINICPM5 = BPEKind((r"\p{N}{1,3}", _words(digits=r"\p{N}+")), ignore_merges=True)
_DEFAULT = BPEKind(
    (
        r"[\p{P}$+<=>\^~|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )
)

BPE_KINDS: dict[str, BPEKind] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "a.x-4.0", "gigachat", "granite-docling", "mellum", "mpt", "olmo", "phi-2", "trillion"), _GPT2
    ),
    **dict.fromkeys(("starcoder", "codeshell", "mellum2", "minerva-7b", "refact", "smollm"), _STARCODER),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "midm-2.0", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), replace(_LLAMA3, ignore_merges=False, add_bos=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2", "kormo", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4"), _GPT4O),
    "minicpm5": _MINICPM5,
    "seed-coder": _SEED_CODER,
    "viking": _VIKING,
}
