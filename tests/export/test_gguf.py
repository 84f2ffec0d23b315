import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.sparse_kin import make_kin
from models.tiny import GGUF_VARIANTS, variants
from models.tiny_hf import hf_logits, make_model
from text.conftest import TEXTS, sentencepiece_keys, train_byte_level, train_sentencepiece, write_gguf
from thinfer.errors import CheckpointError, ResourceError, UnsupportedError, UsageError
from thinfer.export.gguf import export_gguf
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from thinfer.text.pretokenizers import PRE_TOKENIZERS
from thinfer.text.tokenizer import Tokenizer

VOCAB = 640
WRITTEN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
# What GGUF's architectures have no key for.
INEXPRESSIBLE = {
    ("qwen2", "upper_window"): "one sliding window",
    ("qwen3", "layer_types"): "one sliding window",
}


def write_folder(folder: Path, model: Any, tokenizer: Any = None, **tokenizer_config: Any) -> Path:
    """A folder as transformers writes it, with a tokenizer of 606 tokens for 640 rows."""
    model.save_pretrained(folder)
    return write_tokenizer(folder, tokenizer, **tokenizer_config)


def write_tokenizer(folder: Path, tokenizer: Any = None, **tokenizer_config: Any) -> Path:
    """The files of a tokenizer of 606 tokens."""
    (tokenizer or train_byte_level("llama-bpe")).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config, **tokenizer_config})
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with grouped heads, half of whose weights are zero."""
    model = make_model("llama", "gqa", vocab_size=VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(torch.rand_like(parameter) < 0.5)
    return write_folder(tmp_path_factory.mktemp("export") / "half", model)


# The types that are written; of the others the folder is what thinfer reads.
WRITTEN = [(model_type, variant) for model_type, variant in variants() if model_type in WRITTEN_TYPES]


@pytest.mark.parametrize(("model_type", "variant"), WRITTEN)
def test_the_file_is_the_same_model(tmp_path: Path, model_type: str, variant: str) -> None:
    model = make_model(model_type, variant, vocab_size=VOCAB)
    source = write_folder(tmp_path / "model", model)
    out = tmp_path / "model.gguf"
    if (model_type, variant) in INEXPRESSIBLE:
        with pytest.raises(UnsupportedError, match=INEXPRESSIBLE[model_type, variant]):
            export_gguf(source, out, "f32")
        assert not list(tmp_path.glob("*.gguf")) + list(tmp_path.glob(".*"))
        return
    report = export_gguf(source, out, "f32")
    original, written = load_model(open_checkpoint(source)), load_model(open_checkpoint(out))
    assert written.ignored == ()
    arch = model_type.replace("mistral", "llama") if original.config.hidden_act == "silu" else "thinfer-llama"
    assert report.architecture == written.config.model_type == arch
    # GGUF has these numbers as float32.
    assert written.config.rms_norm_eps == pytest.approx(original.config.rms_norm_eps, rel=1e-6)
    same = {"model_type": "x", "rope": original.config.rope, "rms_norm_eps": 1.0}
    assert replace(written.config, **same) == replace(original.config, **same)
    np.testing.assert_allclose(written.config.rope.inv_freq, original.config.rope.inv_freq, rtol=1e-6)
    assert written.weights.names == original.weights.names
    for name in original.weights.names:
        np.testing.assert_array_equal(written.weights.float32(name), original.weights.float32(name))
    if (model_type, variant) in GGUF_VARIANTS and model_type != "qwen3":
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=out.name, dtype=torch.float32)
        ids = np.arange(5, 25)
        np.testing.assert_allclose(hf_logits(theirs.eval(), ids), hf_logits(model, ids), atol=2e-5)
    elif model_type != "qwen3" and variant not in ("dynamic", "full"):
        assert any("reader" in note or "readers" in note for note in report.notes)


@pytest.mark.parametrize("name", ["fatrelu", "drelu", "bamboo", "relufied_llama"])
def test_sparse_llamas_say_their_activation(tmp_path: Path, name: str) -> None:
    make_kin(name, tmp_path / "model", vocab_size=VOCAB)
    write_tokenizer(tmp_path / "model")
    report = export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f32")
    original, written = (
        load_model(open_checkpoint(tmp_path / "model")),
        load_model(open_checkpoint(tmp_path / "m.gguf")),
    )
    assert report.architecture == "thinfer-llama"
    assert any("no reader but thinfer" in note for note in report.notes)
    assert written.config.act_threshold == pytest.approx(original.config.act_threshold)
    for field in ("hidden_act", "norm_act", "layer_windows"):
        assert getattr(written.config, field) == getattr(original.config, field)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: make_kin("relufied_qwen2", folder, vocab_size=VOCAB), "relu after its norms"),
        (lambda folder: make_model("opt", "tied", vocab_size=VOCAB).save_pretrained(folder), "opt are not written"),
        (lambda folder: make_model("bloom", "tied", vocab_size=VOCAB).save_pretrained(folder), "bloom are not written"),
    ],
)
def test_models_that_are_not_written(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "model")
    with pytest.raises(UnsupportedError, match=message):
        export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize(("kind", "error"), [("f32", 0.0), ("f16", 1e-3), ("q8_0", 1e-2), ("q4_0", 0.15)])
def test_types_and_zeros(folder: Path, tmp_path: Path, kind: str, error: float) -> None:
    out = tmp_path / "m.gguf"
    report = export_gguf(folder, out, kind)
    before = load_file(folder / "model.safetensors")
    reader = gguf.GGUFReader(out)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert report.bytes == out.stat().st_size
    assert len(report.tensors) == len(stored) == len(before)
    assert report.zeros_lost == 0
    for tensor in report.tensors:
        found = stored[tensor.gguf_name]
        values = gguf.dequantize(found.data, found.tensor_type).reshape(tensor.shape)
        original = before[tensor.name]
        matrix = "Q8_0" if kind == "q4_0" and tensor.name == "lm_head.weight" else kind.upper()
        assert tensor.type == found.tensor_type.name == (matrix if original.ndim == 2 else "F32")
        assert tensor.zeros == (original == 0).sum()
        assert tensor.zeros + tensor.zeros_new == (values == 0).sum()
        if original.ndim == 2 and "q_proj" not in tensor.name and "k_proj" not in tensor.name:
            assert np.all(values[original == 0] == 0)
            assert np.abs(values - original).max() <= error * np.abs(original).max()
    matrices = [w for w in before.values() if w.ndim == 2]
    assert report.sparsity == sum((w == 0).sum() for w in matrices) / sum(w.size for w in matrices)
    assert 0.45 < report.sparsity < 0.55
    assert bool(report.zeros_new) == any("became zero" in note for note in report.notes)


def test_rows_that_no_block_fits_are_stored_as_f16(tmp_path: Path) -> None:
    model = make_model("llama", "gqa", vocab_size=VOCAB, intermediate_size=72)
    report = export_gguf(write_folder(tmp_path / "m", model), tmp_path / "m.gguf", "q4_0")
    types = {tensor.name.split(".")[-2]: tensor.type for tensor in report.tensors}
    assert (types["down_proj"], types["gate_proj"], types["lm_head"]) == ("F16", "Q4_0", "Q8_0")
    assert any("2 matrices have rows that are no multiple of 32" in note for note in report.notes)


def test_values_that_a_type_cannot_hold(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "big"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    for value, message in (
        (1e5, r"lm_head.weight: a weight of size 100000 does not fit.*export as f32"),
        (np.nan, "broken"),
    ):
        weights["lm_head.weight"][3, 4] = value
        save_file(weights, source / "model.safetensors")
        with pytest.raises(UnsupportedError, match=message):
            export_gguf(source, tmp_path / "m.gguf", "f16")
    assert [p.name for p in tmp_path.iterdir()] == ["big"]


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-v3"])
def test_byte_level_tokenizers(tmp_path: Path, pre: str) -> None:
    tokenizer = train_byte_level(pre)
    source = write_folder(tmp_path / "m", make_model("qwen2", "tied", vocab_size=VOCAB), tokenizer, add_bos_token=False)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    export_gguf(source, tmp_path / "m.gguf", "f16")
    written = open_checkpoint(tmp_path / "m.gguf")
    assert PRE_TOKENIZERS[str(written.metadata["tokenizer.ggml.pre"])] == PRE_TOKENIZERS[pre]
    ours = Tokenizer.from_checkpoint(written)
    for text in TEXTS:
        assert ours.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    marked = "<|im_start|>x</s> <think>y"
    assert ours.encode(marked, parse_special=True) == tokenizer.encode(marked).ids
    assert (ours.bos_id, ours.adds_bos, set(ours.eos_ids)) == (1, False, {2, 4})
    assert written.metadata["tokenizer.chat_template"] == TEMPLATE
    assert len(written.metadata["tokenizer.ggml.tokens"]) == VOCAB


def test_transformers_reads_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    export_gguf(folder, tmp_path / "m.gguf", "f16")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    original = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False), text
    assert theirs.chat_template == TEMPLATE


@pytest.mark.parametrize("style", ["normalizer", "metaspace", "no prefix"])
def test_sentencepiece_tokenizers(tmp_path: Path, style: str) -> None:
    import sentencepiece
    from tokenizers import decoders, pre_tokenizers

    proto = train_sentencepiece()
    keys = sentencepiece_keys(proto) | {"tokenizer.ggml.add_space_prefix": style != "no prefix"}
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(write_gguf(tmp_path / "spm.gguf", keys)))._backend
    if style == "metaspace":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    named = {"unk_token": "<unk>"}
    source = write_folder(tmp_path / "m", make_model("llama", "gqa", vocab_size=VOCAB), tokenizer, **named)
    report = export_gguf(source, tmp_path / "m.gguf", "f16")
    assert any("begins with a space" in note for note in report.notes) is (style == "metaspace")
    written = open_checkpoint(tmp_path / "m.gguf")
    assert written.metadata["tokenizer.ggml.model"] == "llama"
    ours = Tokenizer.from_checkpoint(written)
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto)
    for text in TEXTS:
        if style == "metaspace" and text[:1] == " ":
            continue
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == expected
        if style != "no prefix":
            assert reference.encode(text) == expected
    assert ours.adds_bos
    assert list(written.metadata["tokenizer.ggml.token_type"][:3]) == [2, 3, 3]


def test_tokenizers_that_gguf_cannot_express(tmp_path: Path) -> None:
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    model = make_model("llama", "gqa", vocab_size=VOCAB)
    lower, strange = train_byte_level("qwen2"), train_byte_level("qwen2")
    lower.normalizer = normalizers.Lowercase()
    steps = [pre_tokenizers.Split(Regex(r"[a-m]+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    strange.pre_tokenizer = pre_tokenizers.Sequence(steps)
    unigram = Backend(models.Unigram([("a", -1.0)]))
    unigram.decoder = lower.decoder
    cases = [(lower, "no name for"), (strange, "no name for"), (unigram, "type 'Unigram' has no GGUF form")]
    for tokenizer, message in cases:
        source = write_folder(tmp_path / "m", model, tokenizer)
        with pytest.raises(UnsupportedError, match=message):
            export_gguf(source, tmp_path / "m.gguf", "f16")
    (source / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match=r"no tokenizer\.json"):
        export_gguf(source, tmp_path / "m.gguf", "f16")
    source = write_folder(tmp_path / "n", make_model("llama", "gqa", vocab_size=300))
    with pytest.raises(CheckpointError, match="outside the embedding of 300 rows"):
        export_gguf(source, tmp_path / "m.gguf", "f16")
    assert not list(tmp_path.glob("*.gguf"))


def test_layers_of_different_widths_are_refused(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "uneven"
    source.mkdir()
    for file in folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.1.mlp.{name}.weight"] = weights[f"model.layers.1.mlp.{name}.weight"][:64].copy()
    weights["model.layers.1.mlp.down_proj.weight"] = weights["model.layers.1.mlp.down_proj.weight"][:, :64].copy()
    save_file(weights, source / "model.safetensors")
    with pytest.raises(
        UnsupportedError, match=r"differ in width \(mlp\.\w+_proj\.weight is .*prune with uniform widths"
    ):
        export_gguf(source, tmp_path / "m.gguf")
    config = json.loads((folder / "config.json").read_text())
    for change in ({"per_layer_config": {"1": {"intermediate_size": 64}}}, {"intermediate_size": [96, 64]}):
        (source / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UnsupportedError, match=r"config\.json gives widths per layer"):
            export_gguf(source, tmp_path / "m.gguf")


def test_wrong_arguments(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose one of f32, f16, q8_0, q4_0"):
        export_gguf(folder, tmp_path / "m.gguf", "q4_k")
    with pytest.raises(UsageError, match=r"ending in \.gguf"):
        export_gguf(folder, tmp_path / "m.bin")
    with pytest.raises(UsageError, match="make it first"):
        export_gguf(folder, tmp_path / "no" / "m.gguf")
    export_gguf(folder, tmp_path / "m.gguf")
    with pytest.raises(UnsupportedError, match="is a GGUF file; export reads"):
        export_gguf(tmp_path / "m.gguf", tmp_path / "n.gguf")


def test_a_failure_leaves_the_old_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.gguf"
    out.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(ResourceError, match=r"m\.gguf: cannot be written \(No space left on device\)"):
        export_gguf(folder, out)
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.peer
def test_llama_cpp_gives_the_same_logits(folder: Path, tmp_path: Path) -> None:
    python = os.environ.get("THINFER_PEER_PYTHON")
    if not python:
        pytest.skip("THINFER_PEER_PYTHON names no Python with llama-cpp-python")
    export_gguf(folder, tmp_path / "m.gguf", "f32")
    script = (
        "import sys, json, numpy as np; from llama_cpp import Llama;"
        "m = Llama(sys.argv[1], logits_all=True, verbose=False, n_threads=1, n_ctx=64);"
        "m.eval(list(range(5, 25)));"
        "print(json.dumps([np.array(m.scores[:20]).tolist(), m.tokenize('Hello 123 é😀'.encode(), add_bos=False)]))"
    )
    run = subprocess.run([python, "-c", script, str(tmp_path / "m.gguf")], capture_output=True, text=True, check=True)
    logits, ids = json.loads(run.stdout)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # llama.cpp keeps keys and values in half precision.
    np.testing.assert_allclose(np.array(logits), hf_logits(model, np.arange(5, 25)), atol=0.05)
    assert ids == Tokenizer.from_checkpoint(open_checkpoint(folder)).encode("Hello 123 é😀", add_special=False)
