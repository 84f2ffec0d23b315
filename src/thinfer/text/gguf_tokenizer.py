"""A ``tokenizers.Tokenizer`` rebuilt from the metadata of a GGUF file."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.text.pretokenizers import pre_tokenizer

_SPACE = "▁"
# token types of GGUF
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_KINDS = ("gpt2", "llama")
# Tokens with which chat models end their turn. GGUF files name one EOS, models often use a second one.
_END_OF_TURN = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>")
)


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A rebuilt tokenizer and what the file says about its special tokens.

    Attributes:
        backend: The tokenizer; it adds neither BOS nor EOS by itself.
        bos_id: The id of BOS, or None.
        eos_ids: All ids that end a text or a turn; the file's EOS comes first.
        add_bos: Whether a text begins with BOS.
        add_eos: Whether a text ends with EOS.
        named: The texts of the named special tokens, as chat templates use them: ``bos_token`` and so on.
    """

    backend: Backend
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    named: Mapping[str, str]


class _Metadata:
    """Typed reads of the tokenizer's keys; a wrong type is one clear error."""

    def __init__(self, metadata: Mapping[str, object], where: str) -> None:
        self._metadata, self.where = metadata, where

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: tokenizer.ggml.{key} {what}; the file is corrupt, fetch it again")

    def get(self, key: str) -> object:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, "is not a string")
        return default if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, "is not a boolean")
        return default if value is None else value

    def strings(self, key: str) -> list[str] | None:
        value = self.get(key)
        if value is None:
            return None
        items = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
        if items is None or (items and not isinstance(items[0], str)):
            raise self.fail(key, "is not an array of strings")
        return items

    def numbers(self, key: str, count: int) -> npt.NDArray[np.float32] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.shape != (count,):
            raise self.fail(key, f"is not an array of {count} numbers, one a token")
        return value.astype(np.float32)

    def token_id(self, name: str, count: int) -> int | None:
        value = self.get(f"{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
            raise self.fail(f"{name}_token_id", f"is {value!r}, not one of the {count} tokens")
        return value


def build_tokenizer(metadata: Mapping[str, object], where: str) -> GgufTokenizer:
    """Rebuild the tokenizer of a GGUF file.

    Args:
        metadata: The keys of the file.
        where: The file, for messages.

    Returns:
        The tokenizer with its special tokens.

    Raises:
        UnsupportedError: No tokenizer, or one whose kind or pre-tokenizer is unknown.
        CheckpointError: Keys of wrong types or lengths, merges of unknown tokens.

    Example:
        >>> build_tokenizer(checkpoint.metadata, "model.gguf").backend.encode("Hi").ids  # doctest: +SKIP
        [33066]
    """
    data = _Metadata(metadata, where)
    kind = data.text("model", "no tokenizer")
    tokens = data.strings("tokens")
    if kind not in _KINDS or not tokens:
        raise UnsupportedError(
            f"{where}: tokenizer kind {kind!r} is not supported; supported are {', '.join(_KINDS)}"
            " (byte-level BPE and SentencePiece with scores)"
        )
    types = data.numbers("token_type", len(tokens))
    if types is None:
        types = np.full(len(tokens), _NORMAL, np.float32)
    backend, add_bos = _byte_level(data, tokens) if kind == "gpt2" else _sentencepiece(data, tokens, types)
    ids = {name: data.token_id(name, len(tokens)) for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    special = {i for i in ids.values() if i is not None}
    special.update(np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist())
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in sorted(special)])
    whole = [tokens[i] for i in np.flatnonzero(types == _USER_DEFINED).tolist() if i not in special and tokens[i]]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])
    ends = [ids["eos"], ids["eot"], ids["eom"], *(i for i in sorted(special) if tokens[i] in _END_OF_TURN)]
    named = {"bos_token": ids["bos"], "eos_token": ids["eos"], "unk_token": ids["unknown"], "pad_token": ids["padding"]}
    return GgufTokenizer(
        backend=backend,
        bos_id=ids["bos"],
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        add_bos=ids["bos"] is not None and data.flag("add_bos_token", add_bos),
        add_eos=ids["eos"] is not None and data.flag("add_eos_token", False),
        named={name: tokens[i] for name, i in named.items() if i is not None},
    )


def _byte_level(data: _Metadata, tokens: list[str]) -> tuple[Backend, bool]:
    merges = data.strings("merges")
    if merges is None:
        raise data.fail("merges", "is missing")
    # One join and one split are several times faster than a split for each of 150,000 merges.
    flat = " ".join(merges).split(" ")
    if merges and len(flat) != 2 * len(merges):
        raise data.fail("merges", "has entries that are not two tokens and a space")
    pairs = _pairs(flat) if merges else []
    pre = pre_tokenizer(data.text("pre", "default"), data.where)
    model = _bpe(data, dict(zip(tokens, range(len(tokens)), strict=True)), pairs, ignore_merges=pre.ignore_merges)
    backend = Backend(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=data.flag("add_space_prefix", False), use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _pairs(flat: list[str]) -> list[tuple[str, str]]:
    # The collector would look at the new tuples again and again, for longer than it takes to make them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return list(zip(flat[::2], flat[1::2], strict=True))
    finally:
        if collecting:
            gc.enable()


def _sentencepiece(data: _Metadata, tokens: list[str], types: npt.NDArray[np.float32]) -> tuple[Backend, bool]:
    merges = data.strings("merges")
    if merges is not None:
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    else:
        scores = data.numbers("scores", len(tokens))
        if scores is None:
            raise data.fail("scores", "is missing, and so is merges")
        # Control, unknown, unused and byte tokens never come out of ordinary text.
        pairs = _merges_from_scores({tokens[i]: float(scores[i]) for i in np.flatnonzero(types == _NORMAL).tolist()})
    unknown = data.token_id("unknown", len(tokens))
    backend = Backend(
        _bpe(
            data,
            dict(zip(tokens, range(len(tokens)), strict=True)),
            pairs,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    undo: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if data.flag("add_space_prefix", True):
        # As SentencePiece does: one space is put before every text, also before one that begins with a space.
        steps.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(content=" ", left=1, right=0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undo)
    return backend, True


def _bpe(data: _Metadata, vocab: dict[str, int], pairs: list[tuple[str, str]], **options: object) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=pairs, **options)
    except Exception as error:  # the library raises plain Exception when a merge names a token that does not exist
        raise data.fail("merges", f"does not fit the tokens ({error})") from error


def _merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs that make each token, best first: SentencePiece joins the pair of the highest score first."""
    found = [
        (score, len(token) - i, i, token)
        for token, score in scores.items()
        for i in range(1, len(token))
        if token[:i] in scores and token[i:] in scores
    ]
    found.sort(key=lambda entry: (-entry[0], entry[1]))
    return [(token[:i], token[i:]) for _, _, i, token in found]
