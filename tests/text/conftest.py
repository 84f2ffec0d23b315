"""Tiny tokenizers for the tests, trained on a few lines of many languages, code and emoji."""

import functools
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from thinfer.text.pretokenizers import PRE_TOKENIZERS

CORPUS = [
    "The quick brown fox jumps over the lazy dog. I'm sure it's fine; they'll see WE'LL see 12345 67.",
    "def add(a, b):\n    return a + b  # sum\n\n\nclass Thing:\n\tvalue = {'k': [1, 2, 3]}\n",
    "naïve café — “quotes”… Ünïcödé straße, русский текст, ελληνικά, العربية, हिन्दी, 中文字符, 日本語テキスト, 한국어",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 🤖 ❤️",
    "  leading and   multiple  spaces \n\n\t\ttabs\r\nline\r\n",
] * 4
TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "a",
    "Hello world",
    "price 12345.678 and x = 12",
    "if x:\n        y\n\n\n",
    "𝔘𝔫𝔰𝔢𝔢𝔫 ☃ \u200b zero width \u00a0 nbsp",
    "unseen: ქართული ไทย 🦀🧬",
]
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
MARKUP = "<think>"


def cached_model(name: str) -> Path:
    """A model file of the cache, or skip."""
    path = Path(os.environ.get("THINFER_CACHE", "~/.cache/thinfer")).expanduser() / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; make demo fetches models, THINFER_CACHE names another folder")
    return path


def train_byte_level(pre: str, size: int = 600) -> Tokenizer:
    """A byte-level BPE as a model of that pre-tokenizer would ship in its tokenizer.json."""
    return Tokenizer.from_str(_trained(pre, size))


@functools.cache
def _trained(pre: str, size: int) -> str:
    entry = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=entry.ignore_merges))
    if entry.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in entry.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(SPECIAL)
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(MARKUP, special=False, normalized=False)])
    return tokenizer.to_str()


def byte_level_keys(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """The GGUF keys that a converter writes for a byte-level BPE."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 4 if t == MARKUP else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
    }


def train_sentencepiece(size: int = 600) -> bytes:
    """A SentencePiece BPE model with byte fallback, as Llama 2 has."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines() if line),
        model_writer=out,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=[MARKUP],
        control_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    return out.getvalue()


def sentencepiece_keys(model: bytes) -> dict[str, Any]:
    """The GGUF keys that a converter writes for a SentencePiece model."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    count = processor.get_piece_size()
    kinds = [
        2
        if processor.is_unknown(i)
        else 3
        if processor.is_control(i)
        else 6
        if processor.is_byte(i)
        else 4
        if processor.id_to_piece(i) == MARKUP
        else 1
        for i in range(count)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }


def write_gguf(path: Path, keys: dict[str, Any]) -> Path:
    """A GGUF file with these keys and one small tensor."""
    writer = GGUFWriter(path, "llama")
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("w", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def sentencepiece_model() -> bytes:
    return train_sentencepiece()
