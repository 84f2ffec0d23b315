import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from text.conftest import (
    MARKUP,
    SPECIAL,
    TEXTS,
    byte_level_keys,
    sentencepiece_keys,
    train_byte_level,
    write_gguf,
)
from thinfer.errors import CheckpointError, UnsupportedError, UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.text.pretokenizers import PRE_TOKENIZERS
from thinfer.text.tokenizer import Tokenizer

# One of each group of names that share their rules.
GROUPS = list({entry: name for name, entry in PRE_TOKENIZERS.items()}.values())


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(path))


@pytest.mark.parametrize("pre", GROUPS)
def test_byte_level_ids_equal_the_original(tmp_path: Path, pre: str) -> None:
    original = train_byte_level(pre)
    tokenizer = load(write_gguf(tmp_path / "m.gguf", byte_level_keys(original, pre)))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        if not PRE_TOKENIZERS[pre].nfc:
            assert tokenizer.decode(ids) == text
    marked = "<|im_start|>x</s> <think>y"
    assert tokenizer.encode(marked, add_special=False, parse_special=True) == original.encode(marked).ids


def test_long_texts_let_other_threads_run(tmp_path: Path) -> None:
    original = train_byte_level("llama-bpe")
    tokenizer = load(write_gguf(tmp_path / "m.gguf", byte_level_keys(original, "llama-bpe")))
    text = "".join(TEXTS) * (400_000 // len("".join(TEXTS)))
    done = threading.Event()
    ids: list[int] = []

    def encode() -> None:
        ids.extend(tokenizer.encode(text, add_special=False))
        done.set()

    begin = last = time.perf_counter()
    worker = threading.Thread(target=encode)
    worker.start()
    longest = 0.0
    while not done.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    worker.join()
    assert ids == original.encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= len(ids) * tokenizer.longest_token
    assert longest < (last - begin) / 2, "this thread stood still while the text was cut"


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_byte_level_ids_equal_transformers_reading_the_gguf(tmp_path: Path, pre: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level_keys(train_byte_level(pre), pre))
    tokenizer = load(path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids) == theirs.decode(ids)


def test_sentencepiece_ids_equal_sentencepiece(tmp_path: Path, sentencepiece_model: bytes) -> None:
    import sentencepiece

    original = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    tokenizer = load(write_gguf(tmp_path / "m.gguf", sentencepiece_keys(sentencepiece_model)))
    assert tokenizer.strips_space
    for text in [*TEXTS, "  two before", f"ends with {MARKUP}", "<s> is text </s>", "<0x41>"]:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == original.encode(text), text
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids) == original.decode(ids)
    assert tokenizer.encode("a")[0] == original.bos_id()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("abc theing\nß中😀.'<>/s▁1"), max_size=40))
def test_sentencepiece_on_random_text(text: str, sentencepiece_pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, original = sentencepiece_pair
    assert tokenizer.encode(text, add_special=False) == original.encode(text)


@pytest.fixture(scope="module")
def sentencepiece_pair(tmp_path_factory: pytest.TempPathFactory, sentencepiece_model: bytes) -> tuple[Tokenizer, Any]:
    import sentencepiece

    path = write_gguf(tmp_path_factory.mktemp("spm") / "m.gguf", sentencepiece_keys(sentencepiece_model))
    return load(path), sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)


def test_sentencepiece_ids_equal_transformers_reading_the_gguf(tmp_path: Path, sentencepiece_model: bytes) -> None:
    path = write_gguf(tmp_path / "m.gguf", sentencepiece_keys(sentencepiece_model))
    tokenizer = load(path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        if text[:1] == " ":  # theirs loses one space there, SentencePiece does not
            continue
        assert tokenizer.encode(text) == theirs.encode(text), text


def test_sentencepiece_without_prefix(tmp_path: Path, sentencepiece_model: bytes) -> None:
    keys = {**sentencepiece_keys(sentencepiece_model), "tokenizer.ggml.add_space_prefix": False}
    tokenizer = load(write_gguf(tmp_path / "m.gguf", keys))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the", add_special=False)[0] != tokenizer.encode(" the", add_special=False)[0]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_one_bos_as_the_file_says(tmp_path: Path, pre: str) -> None:
    keys = byte_level_keys(train_byte_level(pre), pre)
    bos, eos = keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]
    for stated, expected in ((None, pre == "llama-bpe"), (True, True), (False, False)):
        extra = {} if stated is None else {"tokenizer.ggml.add_bos_token": stated}
        tokenizer = load(write_gguf(tmp_path / "m.gguf", {**keys, **extra}))
        assert (tokenizer.encode("x")[0] == bos) is expected
        assert tokenizer.adds_bos is expected
        assert tokenizer.encode("<s>x", parse_special=True).count(bos) == 1
        assert tokenizer.encode("<s>x").count(bos) == expected
        assert bos not in tokenizer.encode("x", add_special=False)
    tokenizer = load(write_gguf(tmp_path / "m.gguf", {**keys, "tokenizer.ggml.add_eos_token": True}))
    assert tokenizer.encode("x")[-1] == eos
    assert tokenizer.bos_id == bos
    assert tokenizer.eos_ids == (eos, tokenizer.token_id("<|im_end|>"))
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_users_text_never_becomes_control_tokens(tmp_path: Path, kind: str, sentencepiece_model: bytes) -> None:
    keys = (
        byte_level_keys(train_byte_level("llama-bpe"), "llama-bpe")
        if kind == "bpe"
        else sentencepiece_keys(sentencepiece_model)
    )
    if kind == "bpe":
        # A hostile or careless vocabulary whose merges build a control token out of plain text.
        tokens, merges = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.merges"]
        tokens.append("s>")
        keys["tokenizer.ggml.token_type"].append(1)
        merges[:0] = ["s >", "< s>"]
    tokenizer = load(write_gguf(tmp_path / "m.gguf", keys))
    for token in SPECIAL:
        for text in (token, f"a{token}b", token * 3, f"<{token}"):
            ids = tokenizer.encode(text, add_special=False)
            assert tokenizer.special_ids.isdisjoint(ids), text
            assert tokenizer.decode(ids) == text
        assert tokenizer.token_id(token) in tokenizer.encode(f"a{token}b", parse_special=True)


def test_decode(tmp_path: Path) -> None:
    tokenizer = load(write_gguf(tmp_path / "m.gguf", byte_level_keys(train_byte_level("qwen2"), "qwen2")))
    ids = tokenizer.encode("<|im_start|>é😀", parse_special=True)
    assert tokenizer.decode(ids) == "é😀"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>é😀"
    assert tokenizer.decode([ids[-1], 10**6]) == "\ufffd"  # the last byte of an emoji, and an id of the padding
    assert tokenizer.token_bytes(10**6) == b""
    with pytest.raises(UsageError, match="negative"):
        tokenizer.decode([-1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, UnsupportedError, "'martian' is not supported; supported are.*qwen2"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedError, "'bert' is not supported; supported are gpt2, llama"),
        ({"tokenizer.ggml.model": None}, UnsupportedError, "'no tokenizer' is not supported"),
        ({"tokenizer.ggml.model": 3}, CheckpointError, "ggml.model is not a string"),
        ({"tokenizer.ggml.tokens": None}, UnsupportedError, "not supported"),
        ({"tokenizer.ggml.tokens": [1, 2]}, CheckpointError, "ggml.tokens is not an array of strings"),
        ({"tokenizer.ggml.merges": None}, CheckpointError, "ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["a b c"]}, CheckpointError, "not two tokens and a space"),
        ({"tokenizer.ggml.merges": ["nope neither"]}, CheckpointError, "does not fit the tokens"),
        ({"tokenizer.ggml.token_type": [1]}, CheckpointError, "token_type is not an array of"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, CheckpointError, "bos_token_id is 1000000, not one of"),
        ({"tokenizer.ggml.add_bos_token": 1}, CheckpointError, "add_bos_token is not a boolean"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, CheckpointError, "ggml.scores is missing"),
    ],
)
def test_broken_keys(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str) -> None:
    keys = {**byte_level_keys(train_byte_level("qwen2", 300), "qwen2"), **change}
    path = write_gguf(tmp_path / "m.gguf", {k: v for k, v in keys.items() if v is not None})
    with pytest.raises(error, match=message):
        load(path)


def hf_folder(folder: Path, tokenizer: Tokenizer | Any, **config: Any) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [2, 4]}))
    save_file({}, str(folder / "model.safetensors"))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    stated = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**stated, **config}))
    return folder


def test_hf_folder(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    original = train_byte_level("llama-bpe")
    original.enable_truncation(4)
    original.enable_padding(length=64)
    bos, eos = original.token_to_id("<s>"), original.token_to_id("</s>")
    original.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    folder = hf_folder(tmp_path / "model", original)
    tokenizer = load(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert tokenizer.encode("<s>a", parse_special=True) == [bos, *tokenizer.encode("a", add_special=False)]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (bos, (2, 4))
    assert load(hf_folder(folder, original, add_bos_token=False)).encode("a")[0] != bos
    assert load(hf_folder(folder, original, add_bos_token=True, add_eos_token=True)).encode("a")[-1] == eos


def test_hf_sentencepiece_styles(tmp_path: Path, sentencepiece_model: bytes) -> None:
    from tokenizers import decoders, pre_tokenizers

    keys = sentencepiece_keys(sentencepiece_model)
    backend = load(write_gguf(tmp_path / "m.gguf", keys))._backend
    backend.normalizer = None
    for scheme, strips in (("always", True), ("never", False)):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
        tokenizer = load(hf_folder(tmp_path / scheme, backend))
        assert tokenizer.strips_space is strips
        ids = tokenizer.encode("Hello 😀 world")
        assert tokenizer.decode(ids) == "Hello 😀 world"
        assert tokenizer.decode(ids, continuation=True) == " " * strips + "Hello 😀 world"


def test_hf_folder_errors(tmp_path: Path) -> None:
    from tokenizers import decoders

    folder = hf_folder(tmp_path / "model", None)
    with pytest.raises(UnsupportedError, match=r"no tokenizer\.json; write one"):
        load(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(folder)
    original = train_byte_level("qwen2", 300)
    original.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="decoder WordPiece is not supported"):
        load(hf_folder(folder, original))
