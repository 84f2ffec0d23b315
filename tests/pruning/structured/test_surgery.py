"""A cut model is the whole one with the same parts masked; it reloads elsewhere, generates, and runs in the engine."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from pruning.structured_models import GQA, full_model, logits
from pruning.tiny_decoders import tiny_windows
from thinfer.engine.batch import Batch
from thinfer.engine.kv_cache import KvLayout
from thinfer.engine.reference import ReferenceExecutor
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.structured import surgery
from thinfer.pruning.structured.flap import Flap
from thinfer.pruning.structured.groups import find_groups, linear_modules, weight_of
from thinfer.pruning.structured.llm_pruner import LLMPruner
from thinfer.pruning.structured.shortgpt import ShortGPT

WINDOWS = tiny_windows(4, 16)
IDS = tiny_windows(1, 20, seed=5)

CUTS = {
    "llama-gqa-tied": ("llama", GQA, LLMPruner(round_to=8), 0.5),
    "llama-flap": ("llama", GQA, Flap(round_to=8), 0.33),
    "llama-flap-neurons": ("llama", GQA, Flap(parts="neurons", round_to=8), 0.2),
    "llama-channels-tied": ("llama", GQA, LLMPruner(parts="channels", round_to=8), 0.25),
    "llama-layers": ("llama", GQA, LLMPruner(parts="layers"), 0.25),
    "mistral-mha": ("mistral", {"num_key_value_heads": 4}, LLMPruner("l2", round_to=8), 0.33),
    "qwen2-bias": ("qwen2", GQA | {"num_key_value_heads": 4}, LLMPruner("mix", scope="global", round_to=8), 0.33),
    "qwen3-flap": ("qwen3", GQA, Flap(round_to=8), 0.33),
    "qwen3-depth": ("qwen3", GQA, ShortGPT(), 0.5),
}

RELOAD = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
folders, ids = json.loads(sys.argv[1])
ids = torch.tensor(ids)
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        found = {"logits": model(ids).logits, "tied": torch.tensor(tied)}
        for cache in (True, False):
            settings = {"max_new_tokens": 12, "do_sample": False, "use_cache": cache, "eos_token_id": None}
            found[f"cache_{cache}"] = model.generate(ids, **settings)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, f"{folder}/found.safetensors")
"""


@pytest.fixture(scope="module")
def cut_models(tmp_path_factory):
    """By name: the whole model, the cut one, what was cut, its folder, and what another process finds in the folder."""
    made, folders = {}, []
    for name, (architecture, changes, method, sparsity) in CUTS.items():
        folder = tmp_path_factory.mktemp(name)
        cut = full_model(architecture, **changes)
        result = method.prune(cut, WINDOWS, sparsity)
        cut.save_pretrained(folder)
        made[name] = (full_model(architecture, **changes), cut, result, folder)
        folders.append(str(folder))
    arguments = json.dumps([folders, IDS.tolist()])
    subprocess.run([sys.executable, "-c", RELOAD, arguments], check=True, capture_output=True, timeout=300)
    return {name: (*parts, load_file(parts[-1] / "found.safetensors")) for name, parts in made.items()}


@pytest.mark.parametrize("name", CUTS)
def test_a_fresh_process_gets_the_same_logits_and_cached_is_uncached(cut_models, name):
    _, cut, _, folder, found = cut_models[name]
    np.testing.assert_allclose(found["logits"], logits(cut, IDS).numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["cache_True"], found["cache_False"])
    assert not list(folder.glob("*.bin"))


@pytest.mark.parametrize("name", [name for name in CUTS if "channels" not in name])
def test_the_cut_model_is_the_whole_one_with_zeros(cut_models, name):
    _, cut, result, _, _ = cut_models[name]
    whole = full_model(*CUTS[name][:1], **CUTS[name][1])
    if "layers" in result.kept:
        stack = whole.model.layers
        whole.model.layers = torch.nn.ModuleList(stack[index] for index in result.kept["layers"][0])
        for index, layer in enumerate(whole.model.layers):
            layer.self_attn.layer_idx = index
        expected = logits(whole, IDS)
    else:
        layout = find_groups(whole)
        with torch.no_grad():
            for layer, block in enumerate(find_stack(whole).blocks):
                for family in (family for family in layout.families if family.reader in result.kept):
                    for unit in set(range(family.units)) - set(result.kept[family.reader][layer]):
                        weight_of(linear_modules(block.module)[family.reader])[:, family.columns[unit]] = 0
        for index, layer in enumerate(whole.model.layers):
            for reader in ("self_attn.o_proj", "mlp.down_proj"):
                bias = cut.model.layers[index].get_submodule(reader).bias
                if bias is not None:
                    layer.get_submodule(reader).bias = bias
        expected = logits(whole, IDS)
    torch.testing.assert_close(logits(cut, IDS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CUTS)
def test_the_sparsity_is_counted_and_near(cut_models, name):
    whole, cut, result, _, _ = cut_models[name]
    before, after = (
        sum(p.numel() for block in model.model.layers for p in block.parameters()) for model in (whole, cut)
    )
    assert result.sparsity == pytest.approx(1 - after / before)
    assert result.sparsity == pytest.approx(CUTS[name][3], abs=0.035)
    assert result.after == {key: tuple(tensor.shape) for key, tensor in cut.state_dict().items()}
    assert result.before == {key: tuple(tensor.shape) for key, tensor in whole.state_dict().items()}


@pytest.mark.parametrize("name", CUTS)
def test_the_engine_runs_it(cut_models, name):
    _, cut, _, folder, _ = cut_models[name]
    executor = ReferenceExecutor(load_model(open_checkpoint(folder)), KvLayout(num_blocks=2, type="f32"))
    ids = IDS[0].numpy().astype(np.int32)
    rows = np.arange(len(ids), dtype=np.int32)
    sequence, sparse = np.zeros_like(rows), np.zeros(len(ids), np.uint8)
    blocks = np.array([[0, 1]], np.int32)
    found = executor.run(Batch(ids, rows, sequence, sparse, rows, blocks))
    np.testing.assert_allclose(found, logits(cut, IDS)[0].numpy(), rtol=1e-3, atol=2e-3)


def test_the_ratio_and_the_size_of_heads_stay(cut_models):
    _, cut, _, folder, _ = cut_models["llama-gqa-tied"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 1, 8)
    assert cut.model.layers[0].self_attn.num_key_value_groups == 4
    _, _, result, folder, _ = cut_models["qwen2-bias"]
    config = json.loads((folder / "config.json").read_text())
    kept = len(result.kept["self_attn.o_proj"][0])
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (2 * kept, kept)


@pytest.mark.parametrize("name", [name for name in CUTS if "tied" in name])
def test_ties_stay(cut_models, name):
    _, cut, _, folder, found = cut_models[name]
    assert cut.lm_head.weight is cut.model.embed_tokens.weight
    assert found["tied"]
    with safe_open(folder / "model.safetensors", "np") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - safe_open is no mapping


@pytest.mark.parametrize("name", CUTS)
def test_every_layer_has_one_width(cut_models, name):
    _, cut, _, folder, _ = cut_models[name]
    layers = [{key: p.shape for key, p in layer.named_parameters()} for layer in cut.model.layers]
    assert all(layer == layers[0] for layer in layers)
    assert len(layers) == json.loads((folder / "config.json").read_text())["num_hidden_layers"]


def test_dropping_layers_3_and_5_generates_with_a_cache():
    model = full_model("llama", **GQA | {"num_hidden_layers": 7})
    with torch.no_grad():
        for index in (3, 5):
            for end in (model.model.layers[index].self_attn.o_proj, model.model.layers[index].mlp.down_proj):
                end.weight.mul_(1e-4)
    result = ShortGPT().prune(model, WINDOWS, 2 / 7)
    assert result.kept["layers"] == [[0, 1, 2, 4, 6]]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3, 4]
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    cached, uncached = (model.generate(IDS, use_cache=cache, **settings) for cache in (True, False))
    assert torch.equal(cached, uncached)
    assert cached.shape == (1, 40)


@pytest.mark.parametrize("round_to", [16, 32])
def test_widths_are_rounded(round_to):
    model = full_model("llama", intermediate_size=160)
    LLMPruner("l1", "neurons", round_to=round_to).prune(model, WINDOWS, 0.3)
    assert model.config.intermediate_size % round_to == 0
    assert model.model.layers[0].mlp.up_proj.weight.shape[0] == model.config.intermediate_size < 160


def test_the_report_says_which_widths_can_be_had():
    model = full_model("llama", hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    result = LLMPruner(round_to=8).prune(model, WINDOWS, 0.5)
    # The hidden size of a llama must be a multiple of its heads, and 64 is none of 6.
    assert result.notes["self_attn.o_proj"] == "2 of 4 groups of heads; the configuration holds 1, 2, 4"
    assert result.notes["mlp.down_proj"] == f"{model.config.intermediate_size} of 64 neurons"
    assert (result.notes["gradient_samples"], result.notes["gradient_tokens"]) == (4, 16)


def test_bfloat16_stays_bfloat16():
    model = full_model("llama", **GQA).bfloat16()
    LLMPruner(round_to=8).prune(model, WINDOWS, 0.33)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(logits(model, IDS)).all()


@pytest.mark.parametrize(
    ("architecture", "changes", "sparsity", "parts"),
    [
        ("opt", {}, 0.3, "neurons"),
        ("falcon", {}, 0.3, "neurons"),
        ("gpt_neox", {}, 0.3, "neurons"),
        ("gpt2", {}, 0.3, "neurons"),
        ("gemma", {}, 0.3, "heads+neurons"),
        ("phi", {}, 0.3, "heads+neurons"),
        ("mixtral", {}, 0.05, "heads"),
        ("bloom", {}, 0.34, "layers"),
        ("falcon", {}, 0.34, "layers"),
        ("mixtral", {}, 0.34, "layers"),
        ("gpt_oss", {}, 0.5, "layers"),
    ],
)
def test_other_architectures_are_cut_where_they_can_be(architecture, changes, sparsity, parts):
    model = full_model(architecture, **changes)
    result = LLMPruner(parts=parts, round_to=8).prune(model, WINDOWS, sparsity)
    assert 0 < result.sparsity < 1
    config = type(model.config).from_dict(json.loads(model.config.to_json_string()))
    again = type(model)(config)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(again.eval(), IDS), logits(model, IDS))


@pytest.mark.parametrize(
    ("architecture", "parts", "message"),
    [
        ("opt", "heads+neurons", "4 groups of heads .* holds fewer with the size of a head .*; cut neurons or layers"),
        ("bloom", "neurons", "128 neurons were found .* cut layers"),
        ("gpt_neox", "heads", "cut neurons or layers"),
        ("falcon", "heads", "one group of heads .* share one key and value"),
        ("mixtral", "neurons", "no neurons that can be cut were found"),
        ("gpt_oss", "heads", "cut "),
        ("bloom", "channels", "no field of its configuration holds a residual stream narrower than 32"),
    ],
)  # fmt: skip
def test_what_is_not_supported_says_why_and_changes_nothing(architecture, parts, message):
    model = full_model(architecture)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UnsupportedError, match=message):
        LLMPruner("l1", parts, round_to=8).prune(model, WINDOWS, 0.2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_cut_that_changes_more_than_was_masked_is_refused(monkeypatch):
    model = full_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    select = surgery._selections

    def wrong(*given):
        selections = select(*given)
        name = "model.layers.1.mlp.down_proj.weight"
        selections[name] = [(dim, index - (index == index.max()).long()) for dim, index in selections[name]]
        return selections

    monkeypatch.setattr(surgery, "_selections", wrong)
    with pytest.raises(UnsupportedError, match="does not give the logits of the whole one"):
        LLMPruner("l1", "neurons", round_to=8).prune(model, WINDOWS, 0.3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
