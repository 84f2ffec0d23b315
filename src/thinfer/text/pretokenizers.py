"""How text is cut before byte-level BPE, by the name that GGUF files give in ``tokenizer.ggml.pre``.

A GGUF file does not store its tokenizer's pipeline, only this name. Each entry restores what the model's own
tokenizer.json does: regular expressions that cut the text one after another, whether the text is composed (NFC) first,
whether a piece that is a whole token skips the merges, and whether BOS goes first when the file does not say.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from thinfer.errors import UnsupportedError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _WORD + r"|\p{N}{1,3}" + _TAIL
_QWEN2 = _WORD + r"|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}" + _SLASH_TAIL
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = rf"{_START}{_UPPER}*{_LOWER}+{_ENDING}|{_START}{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}" + _SLASH_TAIL
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN_KANA = r"[一-龥\x{3040}-ゟ゠-ヿ]+"
_HAN_HANGUL = r"[一-龥ࠀ-一가-\x{D7FF}]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut text.

    Attributes:
        splits: Regular expressions (Oniguruma); each isolates its matches within the pieces left by those before.
        nfc: Whether the text is composed first.
        ignore_merges: Whether a piece that is a token is taken whole, whatever the merges say.
        add_bos: Whether BOS goes first unless the file says otherwise.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GROUPS: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
    (PreTokenizer((_GPT2,)), "gpt-2 gpt2 mpt olmo jais jina-es jina-de jina-v2-es jina-v2-de jina-v2-code roberta-bpe"),
    (PreTokenizer((_DIGIT, _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True), "llama-bpe llama3 llama-v3 falcon3 pixtral"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_QWEN2,), nfc=True), "qwen2 deepseek-r1-qwen megrez"),
    (PreTokenizer((_QWEN2,)), "stablelm2 hunyuan"),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_GPT4O,)), "gpt-4o"),
    (PreTokenizer((_GPT4O,), add_bos=True), "llama4"),
    (PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3)), "deepseek-v3"),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, _DIGIT)), "deepseek-coder"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    (PreTokenizer((_BLOOM, _DIGIT)), "viking"),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: entry for entry, names in _GROUPS for name in names.split()}
)


def pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """Return the pre-tokenizer of that name.

    Raises:
        UnsupportedError: An unknown name; the message lists the known ones.

    Example:
        >>> pre_tokenizer("llama-bpe", "model.gguf").add_bos
        True
    """
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise UnsupportedError(
            f"{where}: pre-tokenizer {name!r} is not supported; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return found
