"""FLAP's bias is the least-squares bias, its scores are its formula, and constants cost nothing."""

import pytest
import torch

from pruning.structured_models import GQA, full_model, logits
from pruning.tiny_decoders import tiny_windows
from thinfer.errors import UsageError
from thinfer.pruning.statistics import InputStatistics
from thinfer.pruning.structured.flap import Flap, lost_mean, read_inputs, unit_scores
from thinfer.pruning.structured.groups import find_groups

WINDOWS = tiny_windows(6, 16)


def record(model, name, windows=WINDOWS):
    """What a module reads, [tokens, inputs]."""
    found = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(0, -2)))
    logits(model, windows)
    handle.remove()
    return torch.cat(found)


@pytest.mark.parametrize(("kind", "kept"), [("heads", [1]), ("neurons", list(range(0, 64, 3)))])
def test_the_bias_is_the_least_squares_bias(kind, kept):
    model = full_model("llama", **GQA)
    family = find_groups(model).of_kind(kind)[0]
    inputs = read_inputs(model, (family,), WINDOWS)[family.reader][2]
    weight = model.get_submodule(f"model.layers.2.{family.reader}").weight.detach()
    x = record(model, f"model.layers.2.{family.reader}").double()
    stays = torch.zeros(x.shape[1], dtype=torch.float64)
    stays[family.columns[torch.tensor(kept)].flatten()] = 1
    residual = (x - x * stays) @ weight.double().T
    expected = torch.linalg.lstsq(torch.ones(len(x), 1, dtype=torch.float64), residual).solution[0]
    found = lost_mean(family, weight, inputs, torch.tensor(kept))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compensated", [True, False])
def test_scores_are_the_formula(compensated):
    model = full_model("llama", **GQA)
    for family in find_groups(model).families:
        inputs = read_inputs(model, (family,), WINDOWS)[family.reader][1]
        weight = model.get_submodule(f"model.layers.1.{family.reader}").weight.detach()
        x = record(model, f"model.layers.1.{family.reader}").double()
        harm = x.var(0, correction=0) if compensated else x.square().mean(0)
        score = harm * weight.double().square().sum(0)
        score = (score - score.mean()) / score.std(correction=0)
        expected = torch.stack([score[columns].mean() for columns in family.columns])
        found = unit_scores(family, weight, inputs, compensated=compensated)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_large_mean_does_not_change_the_scores():
    """What a bias makes good must not count: the scores are those of the inputs without their mean."""
    model = full_model("llama", **GQA)
    family = find_groups(model).of_kind("neurons")[0]
    weight = model.get_submodule(f"model.layers.0.{family.reader}").weight.detach()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, weight.shape[1], generator=generator) * torch.rand(weight.shape[1], generator=generator)
    scores = []
    for mean in (0.0, 5e4):
        inputs = InputStatistics(x.shape[1], frozenset({"mean"}))
        for batch in (x + mean).split(100):
            inputs.add(batch)
        scores.append(unit_scores(family, weight, inputs, compensated=True))
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-2, atol=1e-2)


def constant_neurons(model, neurons):
    """Make neurons constant but not zero: their mean says it all."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight[neurons] = 0
            layer.mlp.up_proj.weight[neurons] = 0
            layer.mlp.gate_proj.bias[neurons] = 2.0
            layer.mlp.up_proj.bias[neurons] = -1.5
            layer.mlp.down_proj.weight[:, neurons] *= 3
    return model


def test_neurons_that_are_constant_cost_nothing():
    model = constant_neurons(full_model("llama", mlp_bias=True, **GQA), slice(16, 32))
    dense = logits(model, WINDOWS)
    result = Flap(parts="neurons", round_to=16).prune(model, WINDOWS, 0.15)
    assert result.kept["mlp.down_proj"] == [[*range(16), *range(32, 64)]] * 4
    torch.testing.assert_close(logits(model, WINDOWS), dense, rtol=1e-3, atol=1e-3)
    without = constant_neurons(full_model("llama", mlp_bias=True, **GQA), slice(16, 32))
    Flap(parts="neurons", round_to=16, bias=False).prune(without, WINDOWS, 0.15)
    assert (logits(without, WINDOWS) - dense).abs().max() > 0.1


def test_a_configuration_without_biases_gets_them_where_it_can():
    model = full_model("llama", **GQA)
    result = Flap(round_to=8).prune(model, WINDOWS, 0.6)
    assert len(result.kept["self_attn.o_proj"][0]) == 1
    assert result.notes["bias"] == "self_attn.o_proj, mlp.down_proj"
    assert (model.config.attention_bias, model.config.mlp_bias) == (True, True)
    layer = model.model.layers[1]
    assert layer.self_attn.o_proj.bias.any()
    assert layer.mlp.down_proj.bias.any()
    assert not any(module.bias.any() for module in (layer.self_attn.q_proj, layer.mlp.gate_proj))
    model = full_model("qwen2", **GQA)
    result = Flap(round_to=8).prune(model, WINDOWS, 0.3)
    assert result.notes["bias"] == "none"
    assert "self_attn.o_proj, mlp.down_proj" in result.notes["bias_not_held"]


def test_less_harm_than_without_a_bias_or_by_chance():
    """In a real layer: the error of the logits, with the bias and without it."""
    from thinfer.pruning.structured.llm_pruner import LLMPruner

    def error(method):
        model = full_model("llama", **GQA)
        dense = logits(model, WINDOWS)
        method.prune(model, WINDOWS, 0.2)
        return float((logits(model, WINDOWS) - dense).square().mean())

    neurons = {"parts": "neurons", "round_to": 8}
    best, bare = error(Flap(**neurons)), error(Flap(bias=False, **neurons))
    chance = [error(LLMPruner("random", seed=seed, **neurons)) for seed in range(3)]
    assert best < 0.8 * min(chance)
    assert best < bare * 1.1


@pytest.mark.parametrize(
    ("options", "message"), [({"scope": "all"}, "scope is layer or global"), ({"uniform": False}, "one width"),
                             ({"parts": "layers"}, "join some of heads, neurons")]
)  # fmt: skip
def test_options_that_cannot_be(options, message):
    with pytest.raises(UsageError, match=message):
        Flap(**options)
