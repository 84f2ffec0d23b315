"""Models come in from folders and GGUF files, and go out as folders that load anywhere with the same logits."""

import json
import os
import stat
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.tiny_gguf import MIXES, write_tiny_gguf
from pruning.tiny_decoders import tiny_model, tiny_windows
from text.conftest import TEXTS, byte_level_keys, sentencepiece_keys, train_byte_level, train_sentencepiece, write_gguf
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import CheckFailed, CheckpointError, ResourceError, UnsupportedError, UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from thinfer.pruning import saving as module
from thinfer.pruning.checkpoint import load_skeleton, load_torch
from thinfer.pruning.saving import round_weights, save_folder
from thinfer.pruning.tokenizer_files import carry_tokenizer
from thinfer.text.chat import stored_templates
from thinfer.text.tokenizer import Tokenizer
from tiny_llama import CHAT_TEMPLATE, write_tiny_llama

IDS = [5, 9, 200, 31, 7, 7, 90]


def engine_logits(ref):
    options = EngineOptions(executor="reference", activations="f32", kv_type="f32", max_model_len=64)
    with Engine(load_model(open_checkpoint(ref)), options) as engine:
        (logits,) = engine.step([Work(engine.new_sequence(), IDS, logits="all", sparse=False)])
    return logits


def torch_logits(model, ids=IDS):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


FRESH = """
import sys, numpy as np, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([[int(i) for i in sys.argv[3].split(",")]])
with torch.no_grad():
    np.save(sys.argv[2], model(ids).logits[0].float().numpy())
a = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)
b = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=0)
assert torch.equal(a, b)
"""


def test_a_saved_folder_gives_the_same_logits_in_a_fresh_process(tmp_path):
    model = tiny_model("llama")
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.tie_word_embeddings
    save_folder(model, tmp_path / "out")
    ids = tiny_windows(1, 12)[0].tolist()
    command = [sys.executable, "-c", FRESH, tmp_path / "out", tmp_path / "logits.npy", ",".join(map(str, ids))]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), torch_logits(model, ids), rtol=1e-5, atol=1e-5)


def test_a_tied_head_is_stored_once_and_stays_tied(tmp_path):
    model = tiny_model("llama")
    save_folder(model, tmp_path / "out", dtype="bfloat16")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = load_torch(tmp_path / "out").model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert model.lm_head.weight is model.model.embed_tokens.weight, "saving in another type leaves the model's tie"


def test_the_config_names_no_compression_and_no_sparsity(tmp_path, tiny_folder):
    loaded = load_torch(tiny_folder)
    loaded.model.config.sparsity_config = {"format": "dense"}
    save_folder(loaded.model, tmp_path / "out", source=loaded.checkpoint)
    text = (tmp_path / "out" / "config.json").read_text()
    assert "sparsity_config" not in text
    assert "quantization_config" not in text
    old, new = json.loads((tiny_folder / "config.json").read_text()), json.loads(text)
    assert {name: new[name] for name in ("hidden_size", "vocab_size", "architectures", "num_key_value_heads")} == {
        name: old[name] for name in ("hidden_size", "vocab_size", "architectures", "num_key_value_heads")
    }


def test_the_saved_precision_is_the_one_asked_for_and_the_model_is_rounded_to_it(tmp_path, tiny_folder):
    model = load_torch(tiny_folder).model
    round_weights(model, "bfloat16")
    save_folder(model, tmp_path / "out", dtype="bfloat16")
    loaded = load_torch(tmp_path / "out")
    assert loaded.save_dtype == "bfloat16"
    assert loaded.model.dtype == torch.float32, "on the CPU the model runs in float32"
    for name, value in loaded.model.named_parameters():
        assert torch.equal(value, model.get_parameter(name)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_weight_that_the_precision_cannot_hold_is_an_error(tiny_folder):
    model = load_torch(tiny_folder).model
    model.model.norm.weight.data[0] = 1e6
    with pytest.raises(CheckFailed, match="float16 cannot hold"):
        round_weights(model, "float16")


def test_large_models_are_sharded(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setattr(module, "SHARD_SIZE", "100KB")
    model = load_torch(tiny_folder).model
    save_folder(model, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    np.testing.assert_array_equal(torch_logits(load_torch(tmp_path / "out").model), torch_logits(model))


def test_nothing_is_left_of_a_failed_write(tmp_path, tiny_folder, monkeypatch):
    model = load_torch(tiny_folder).model

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_flush", full)
    with pytest.raises(ResourceError, match="No space"):
        save_folder(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(tmp_path, tiny_folder):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="exists already"):
        save_folder(load_torch(tiny_folder).model, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no folder"):
        save_folder(load_torch(tiny_folder).model, tmp_path / "file" / "out")


def test_the_folder_is_as_readable_as_any_other(tmp_path, tiny_folder):
    save_folder(load_torch(tiny_folder).model, tmp_path / "out", files={"README.md": "x"})
    umask = os.umask(0)
    os.umask(umask)
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, path
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask


def test_tokenizer_template_and_settings_of_a_folder_are_carried(tmp_path):
    folder = write_tiny_llama(tmp_path / "m", generation={"eos_token_id": [257, 5], "temperature": 0.6})
    loaded = load_torch(folder)
    save_folder(loaded.model, tmp_path / "out", source=loaded.checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    carried = open_checkpoint(tmp_path / "out")
    assert Tokenizer.from_checkpoint(carried).eos_ids == loaded.tokenizer.eos_ids
    assert stored_templates(carried) == {"default": CHAT_TEMPLATE}
    assert loaded.bos_id == 256


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("add_bos", [False, True])
def test_the_tokenizer_of_a_gguf_file_is_rebuilt(tmp_path, kind, add_bos):
    if kind == "gpt2":
        keys = byte_level_keys(train_byte_level("qwen2"), "qwen2")
    else:
        keys = sentencepiece_keys(train_sentencepiece())
    keys |= {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.chat_template": CHAT_TEMPLATE}
    source = open_checkpoint(write_gguf(tmp_path / "m.gguf", keys))
    folder = write_tiny_llama(tmp_path / "out")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    carry_tokenizer(source, folder)
    ours, carried = Tokenizer.from_checkpoint(source), Tokenizer.from_checkpoint(open_checkpoint(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (carried.adds_bos, carried.bos_id, carried.eos_ids[:1]) == (ours.adds_bos, ours.bos_id, ours.eos_ids[:1])
    assert carried.special_ids == ours.special_ids
    for text in TEXTS:
        assert carried.encode(text) == ours.encode(text), text
        assert theirs(text).input_ids == ours.encode(text, parse_special=True), text
    assert stored_templates(open_checkpoint(folder)) == {"default": CHAT_TEMPLATE}
    assert theirs.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("mix", ["Q4_0", "float beside"])
def test_a_gguf_file_is_dequantised_as_the_engine_reads_it(tmp_path, mix):
    path = write_tiny_gguf(tmp_path / "m.gguf", MIXES[mix])
    loaded = load_torch(path)
    assert "dequantised from" in loaded.notes[0]
    assert loaded.save_dtype == "float32"
    expected = engine_logits(path)
    np.testing.assert_allclose(torch_logits(loaded.model), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    save_folder(loaded.model, tmp_path / "out")
    np.testing.assert_allclose(engine_logits(tmp_path / "out"), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_the_frequency_factors_of_llama_3_become_its_rope_scaling(tmp_path, monkeypatch):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_model("llama", head_dim=64, rope_parameters=scaling).config
    expected = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = (10000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)

    add = gguf.GGUFWriter.add_tensor
    done = []

    def with_factors(self, name, data, **options):
        if not done:
            done.append(name)
            add(self, "rope_freqs.weight", (plain / expected).astype(np.float32))
        add(self, name, data, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", with_factors)
    path = write_tiny_gguf(tmp_path / "m.gguf", MIXES["Q8_0"])
    loaded = load_torch(path).model
    assert loaded.config.rope_parameters["rope_type"] == "llama3"
    assert loaded.config.rope_parameters["factor"] == 32.0
    expected = engine_logits(path)
    np.testing.assert_allclose(torch_logits(loaded), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_a_missing_tensor_is_never_made_up(tmp_path):
    folder = write_tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_torch(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "never_heard_of"}, "transformers cannot load it"),
        ({"model_type": "t5"}, "decoder"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by 'gptq' cannot be pruned"),
    ],
)
def test_what_cannot_be_pruned_says_why(tmp_path, change, message):
    folder = write_tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=message):
        load_torch(folder)


def test_pickled_weights_are_refused(tmp_path):
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="pickled"):
        load_torch(folder)


def test_a_skeleton_has_the_shapes_of_the_model(tiny_folder, tmp_path):
    for ref in (tiny_folder, write_tiny_gguf(tmp_path / "m.gguf", MIXES["Q8_0"])):
        skeleton, full = load_skeleton(ref).model, load_torch(ref).model
        assert {n: tuple(p.shape) for n, p in skeleton.named_parameters()} == {
            n: tuple(p.shape) for n, p in full.named_parameters()
        }
        assert all(p.is_meta for p in skeleton.parameters())


@pytest.mark.parametrize("architecture", ["mixtral", "gpt2", "opt", "gemma"])
def test_other_architectures_survive_the_way_out_and_in(tmp_path, architecture):
    model = tiny_model(architecture)
    ids = tiny_windows(1, 12)[0].tolist()
    save_folder(model, tmp_path / "out")
    np.testing.assert_allclose(
        torch_logits(load_torch(tmp_path / "out").model, ids),
        torch_logits(model.train(False), ids),
        rtol=1e-4,
        atol=1e-4,
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == architecture
