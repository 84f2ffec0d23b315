"""LLM-Pruner against its formulas, computed slowly and element by element."""

import pytest
import torch

from pruning.structured_models import GQA, full_model
from pruning.tiny_decoders import tiny_windows
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.base import make, names
from thinfer.pruning.structured.groups import find_groups
from thinfer.pruning.structured.importance import Salience
from thinfer.pruning.structured.llm_pruner import LLMPruner

WEIGHT = "model.layers.1.mlp.down_proj.weight"
FORMULAS = ["vector", "element1", "element2", "mix", "l1", "l2"]


def sample_gradients(model, name, ids):
    """Gradient of each sample's loss, by transformers' own loss, [samples, *shape], float64."""
    found = []
    for sample in ids:
        model.zero_grad()
        model(input_ids=sample[None], labels=sample[None], use_cache=False).loss.backward()
        found.append(model.get_parameter(name).grad.double())
    return torch.stack(found)


def slow_column(formula, weight, gradients, column):
    total = 0.0
    for row in range(len(weight)):
        w, g = float(weight[row, column]), float(gradients[:, row, column].mean())
        fisher = float(gradients[:, row, column].square().mean())
        total += {
            "vector": w * g,
            "element1": abs(w * g),
            "element2": abs(w * w * fisher),
            "mix": abs(w * g - 0.5 * w * w * fisher),
            "l1": abs(w),
            "l2": w * w,
        }[formula]
    return abs(total)


@pytest.mark.parametrize("formula", FORMULAS)
def test_importance_of_a_column(formula):
    model, ids = full_model("llama"), tiny_windows(3, 12)
    found = Salience(model, [WEIGHT], formula, ids).along(WEIGHT, 1)
    gradients = sample_gradients(model, WEIGHT, ids)
    weight = model.get_parameter(WEIGHT).detach()
    expected = [slow_column(formula, weight, gradients, column) for column in range(64)]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-9)


def test_second_order_does_not_vanish():
    """Squares of gradients of 1e-5 and less are below float16: mix must not be element1."""
    model, ids = full_model("llama").bfloat16(), tiny_windows(3, 12)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
        model.model.norm.weight.mul_(1e-2)
    found = {formula: Salience(model, [WEIGHT], formula, ids).along(WEIGHT, 1) for formula in FORMULAS}
    assert float(found["element1"].max()) < 1e-2
    assert (found["element2"] > 0).all()
    assert not torch.equal(found["mix"], found["element1"])


def test_gradients_that_are_not_finite_or_all_zero_are_refused():
    model, ids = full_model("llama"), tiny_windows(2, 8)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(CheckFailed, match="NaN or infinite"):
        Salience(model, [WEIGHT], "element1", ids)
    model = full_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(CheckFailed, match="all gradients are zero"):
        Salience(model, [WEIGHT], "mix", ids)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("formula", [*FORMULAS, "random"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_units_that_do_nothing_go_first(formula, scope):
    model = full_model("llama", **GQA)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, 10:26] = 0
            layer.mlp.gate_proj.weight[10:26] = 0
            layer.mlp.up_proj.weight[10:26] = 0
    method = LLMPruner(formula, "neurons", scope, round_to=8)
    kept = method.prune(model, tiny_windows(), 0.15).kept["mlp.down_proj"]
    assert {len(units) for units in kept} == {48}
    dead = [sorted(set(range(64)) - set(units)) for units in kept]
    assert (dead == [list(range(10, 26))] * 4) == (formula != "random")


def test_a_head_group_is_scored_by_all_its_members():
    model = full_model("llama", **GQA)
    family = find_groups(model).of_kind("heads")[0]
    # Nothing but v of group 0 is small: a score of one member only would not see it.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[family.rows["self_attn.v_proj"][0]] *= 1e-4
    kept = LLMPruner("l1", "heads").prune(model, tiny_windows(), 0.12).kept["self_attn.o_proj"]
    assert kept == [[1]] * 4


def test_the_same_seed_cuts_the_same():
    def cut(seed):
        method = LLMPruner("random", round_to=8, seed=seed)
        return method.prune(full_model("llama", **GQA), tiny_windows(), 0.3).kept

    assert cut(3) == cut(3)
    assert cut(3) != cut(4)


def test_layers_keep_the_protected():
    model = full_model("llama", num_hidden_layers=8)
    with torch.no_grad():
        for index in (0, 7, 3):
            for parameter in model.model.layers[index].parameters():
                parameter.mul_(1e-3)
    kept = LLMPruner("l2", "layers", protect_last=1).prune(model, tiny_windows(), 0.25).kept["layers"][0]
    assert len(kept) == 6
    assert {0, 7} <= set(kept)
    assert 3 not in kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance": "taylor"}, "choose one of vector"),
        ({"parts": "heads+layers"}, "cut alone"),
        ({"parts": "ffn"}, "join some of heads"),
        ({"scope": "block"}, "choose one of layer, global"),
        ({"uniform": False}, "one width for all layers"),
        ({"protect_first": 4}, "need parts=layers"),
        ({"round_to": 0}, "round_to must be at least 1"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(UsageError, match=message):
        LLMPruner(**options)


@pytest.mark.parametrize(
    ("options", "sparsity", "message"),
    [
        ({}, 0.0, "between 0 and 1"),
        ({"parts": "neurons", "round_to": 64}, 0.2, "no multiple of round_to 64 is below"),
        ({"parts": "neurons"}, 0.05, "smaller round_to"),
        ({"parts": "neurons"}, 0.9, "cut more parts"),
        ({"parts": "layers"}, 0.1, "less than half of one of 4 layers"),
        ({"parts": "layers", "protect_first": 3}, 0.5, "protect fewer layers"),
        ({"parts": "channels"}, 0.05, "smaller round_to"),
    ],
)
def test_what_cannot_be_cut_is_said_and_nothing_changes(options, sparsity, message):
    model = full_model("llama", **GQA)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UsageError, match=message):
        LLMPruner(**options).prune(model, tiny_windows(), sparsity)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_windows_that_are_none():
    with pytest.raises(UsageError, match="one window or more"):
        LLMPruner().prune(full_model("llama", **GQA), [], 0.2)


def test_found_by_name():
    assert names("structured") == ["flap", "llm-pruner", "shortgpt"]
    assert make("llm-pruner", {"parts": "layers"}, "structured") == LLMPruner(parts="layers")
