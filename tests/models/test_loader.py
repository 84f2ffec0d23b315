import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.tiny_hf import hf_logits, make_model, tokens, write_gguf
from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

F32 = gguf.GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_model("llama", "gqa").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    return tmp_path


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load(path):
    return load_model(open_checkpoint(path))


def test_model_facts(folder):
    model = load(folder)
    expected = load_file(folder / "model.safetensors")
    assert model.config.head_dim == 16
    assert model.config.eos_token_ids == (2,)
    assert model.ignored == ()
    assert model.num_parameters == sum(value.size for value in expected.values())
    assert set(model.weights.names) == set(expected)
    name = "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(model.weights.float32(name), expected[name])
    with pytest.raises(CheckpointError, match=r"no weight nothing\.weight"):
        model.weights.source("nothing.weight")


def test_a_base_model_saved_alone_and_the_other_name_of_a_head(tmp_path):
    model = make_model("gpt_neox", "quarter")
    model.save_pretrained(tmp_path)
    name = "embed_out.weight" if "embed_out.weight" in load_file(tmp_path / "model.safetensors") else "lm_head.weight"
    other = {"embed_out.weight": "lm_head.weight", "lm_head.weight": "embed_out.weight"}[name]
    bare = {k.removeprefix("gpt_neox."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    bare[other] = bare.pop(name)
    save_file(bare, tmp_path / "model.safetensors")
    found = load(tmp_path)
    assert found.ignored == ()
    np.testing.assert_array_equal(found.weights.float32("embed_out.weight"), bare[other])
    # Rows of q, k and v lie by head; the engine wants them one after the other.
    fused = bare["layers.0.attention.query_key_value.bias"].reshape(4, 3, 16)
    bias = found.weights.float32("gpt_neox.layers.0.attention.query_key_value.bias")
    np.testing.assert_array_equal(bias, fused.swapaxes(0, 1).reshape(-1))


@pytest.mark.parametrize(
    ("model_type", "variant", "fields", "message"),
    [
        ("opt", "tied", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", "tied", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("bloom", "tied", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("falcon", "grouped", {"parallel_attn": False}, "parallel_attn"),
        ("falcon", "old_mha", {"num_ln_in_parallel_attn": 2}, "two norms"),
    ],
)
def test_unsupported_kin_are_named(tmp_path, model_type, variant, fields, message):
    make_model(model_type, variant).save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(UnsupportedError, match=message):
        load(tmp_path)


def test_missing_tensors_are_all_named(folder):
    edit_tensors(folder, lambda t: (t.pop("model.norm.weight"), t.pop("model.layers.1.mlp.up_proj.weight")))
    with pytest.raises(CheckpointError, match=r"2 tensors are missing: .*1\.mlp\.up_proj\.weight, model\.norm\.weight"):
        load(folder)


def test_wrong_shape_names_tensor_and_both_shapes(folder):
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.zeros(65, np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(65,\), .* needs \(64,\)"):
        load(folder)


def test_extra_tensors_are_reported(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.0.rotary_emb.inv_freq": np.zeros(8, np.float32)}))
    assert load(folder).ignored == ("model.layers.0.rotary_emb.inv_freq",)


def test_tied_head_wins_over_a_stored_one(folder):
    edit_config(folder, tie_word_embeddings=True)
    model = load(folder)
    assert model.ignored == ("lm_head.weight",)
    assert "lm_head.weight" not in model.weights.names
    assert model.weights.source("lm_head.weight") is model.weights.source("model.embed_tokens.weight")


def test_generation_config_says_where_text_ends(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load(folder).config.eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba' is not supported; supported: bamboo, .*, llama, mistral, .*"),
        ({"hidden_act": "quick_gelu"}, r"quick_gelu.*silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": ["awq"]}, "awq"),
    ],
)
def test_unsupported_features_are_named(folder, fields, message):
    edit_config(folder, **fields)
    with pytest.raises(UnsupportedError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a whole number from 1"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"tie_word_embeddings": 1}, "true or false"),
        ({"eos_token_id": "x"}, "token ids"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"num_hidden_layers": 3}, "9 tensors are missing"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be a whole number from 1 to 10000"),
        ({"head_dim": 10**9}, "even head width"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": 1e300}}, "theta"),
    ],
)
def test_damaged_configurations_are_named(folder, fields, message):
    edit_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_qwen_layer_types(tmp_path):
    make_model("qwen2", "upper_window").save_pretrained(tmp_path)
    assert load(tmp_path).config.layer_windows == (None, 6)
    edit_config(tmp_path, layer_types=None, max_window_layers=0)
    assert load(tmp_path).config.layer_windows == (6, 6)
    edit_config(tmp_path, use_sliding_window=False)
    assert load(tmp_path).config.layer_windows == (None, None)
    edit_config(tmp_path, layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(UnsupportedError, match="chunked_attention"):
        load(tmp_path)
    edit_config(tmp_path, layer_types=["full_attention", []])
    with pytest.raises(UnsupportedError, match="layer type"):
        load(tmp_path)
    edit_config(tmp_path, layer_types=None, max_window_layers="all")
    with pytest.raises(CheckpointError, match="max_window_layers"):
        load(tmp_path)


def test_gguf_facts(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama", "mha_tied"), F32, {"extra.weight": np.zeros(3)})
    model = load(path)
    assert (model.config.bos_token_id, model.config.eos_token_ids) == (1, (2,))
    assert model.config.tie_word_embeddings
    assert model.ignored == ("extra.weight",)
    assert model.weights.source("model.layers.0.self_attn.v_proj.weight").row_index is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"expert_count": 8}, "experts"), ({"rope.scaling.type": "longrope"}, "longrope")],
)
def test_unsupported_gguf_features_are_named(extra, message, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama", "gqa"), F32, extra)
    with pytest.raises(UnsupportedError, match=message):
        load(path)


def test_an_absurd_number_of_layers_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    model = make_model("llama", "gqa")
    model.config.num_hidden_layers = 4_000_000_000
    write_gguf(path, model, F32)
    with pytest.raises(CheckpointError, match="block_count must be a whole number from 1 to 10000"):
        load(path)


def test_unknown_gguf_architecture_lists_the_known_ones(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mpt")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"'mpt' is not supported; supported: bloom, .*, thinfer-llama"):
        load(path)


def _llama3_factors(model):
    scaled = np.asarray(model.model.rotary_emb.inv_freq)
    plain = 1 / 10000.0 ** (np.arange(0, 32, 2) / 32)
    return {"rope_freqs.weight": plain / scaled}


# GGUF features that transformers' reader does not know, so only our reading of them can be compared.
@pytest.mark.parametrize(
    ("model_type", "variant", "extra"),
    [
        ("llama", "biases", lambda _: {}),
        ("llama", "llama3", _llama3_factors),
        ("llama", "linear", lambda _: {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (
            "llama",
            "yarn",
            lambda _: {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
        ),
        ("mistral", "window", lambda _: {"attention.sliding_window": 5}),
        ("qwen3", "biases", lambda _: {}),
    ],
)
def test_gguf_metadata_gives_the_logits_of_transformers(model_type, variant, extra, run_logits, tmp_path):
    model = make_model(model_type, variant)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, F32, extra(model))
    assert np.abs(run_logits(path, tokens()) - hf_logits(model, tokens())).max() < 1e-3
    assert load(path).ignored == ()
