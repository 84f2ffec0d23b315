"""Block influence against hidden states that transformers itself gives."""

import itertools

import pytest
import torch

from pruning.structured_models import full_model, logits
from pruning.tiny_decoders import tiny_windows
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.structured.shortgpt import ShortGPT, block_influence, layers_to_keep

WINDOWS = tiny_windows(5, 16)


def test_influence_is_one_minus_the_mean_cosine():
    model = full_model("llama", num_hidden_layers=4)
    after_norm = model.model.norm
    model.model.norm = torch.nn.Identity()  # the last hidden state of transformers is normed
    with torch.no_grad():
        states = model.model(input_ids=WINDOWS, output_hidden_states=True).hidden_states
    model.model.norm = after_norm
    expected = []
    for before, after in itertools.pairwise(states):
        cosines = [
            float(a @ b / (a.norm() * b.norm()))
            for a, b in zip(before.double().reshape(-1, 32), after.double().reshape(-1, 32), strict=True)
        ]
        expected.append(1 - sum(cosines) / len(cosines))
    found = block_influence(model, WINDOWS)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "opt", "gpt_neox", "gemma3_text"])
def test_layers_that_change_nothing_go_and_nothing_changes(architecture):
    model = full_model(architecture, **({} if architecture == "gemma3_text" else {"num_hidden_layers": 4}))
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)
    with torch.no_grad():
        for index in (1, 2):
            for name, parameter in blocks[index].named_parameters():
                # Whatever a branch ends with is zero: its last product, and in gemma3 the norms after it.
                ends = (
                    "o_proj",
                    "down_proj",
                    "out_proj",
                    "fc2",
                    "dense.",
                    "4h_to_h",
                    "post_feedforward",
                    "post_attention",
                )
                if any(end in name for end in ends) and (architecture != "llama" or "layernorm" not in name):
                    parameter.zero_()
                    if "layernorm" in name and architecture == "gemma3_text":
                        parameter.fill_(-1)  # gemma scales by 1 + weight
    dense = logits(model, WINDOWS)
    result = ShortGPT().prune(model, WINDOWS, 0.5)
    assert result.kept["layers"] == [[0, 3]]
    assert result.sparsity == pytest.approx(0.5, abs=0.01)
    torch.testing.assert_close(logits(model, WINDOWS), dense)
    if architecture == "gemma3_text":
        assert model.config.layer_types == ["sliding_attention", "full_attention"]


def test_protected_layers_stay():
    influence = torch.tensor([0.0, 0.5, 0.1, 0.1, 0.0])
    assert layers_to_keep(influence, 0.4, 0, 0) == [1, 2, 3]
    assert layers_to_keep(influence, 0.4, 1, 1) == [0, 1, 4]
    assert layers_to_keep(influence, 0.2, 0, 0) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="4 of 5 layers shall go, but 3 can"):
        layers_to_keep(influence, 0.8, 1, 1)
    with pytest.raises(UsageError, match=r"ask for 0.200 or more"):
        layers_to_keep(influence, 0.05, 0, 0)


def test_a_hidden_state_that_is_not_finite():
    model = full_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.inf
    with pytest.raises(CheckFailed, match="load the model in float32"):
        ShortGPT().prune(model, WINDOWS, 0.34)


def test_lists_with_an_entry_a_layer_are_cut_and_no_others():
    model = full_model("qwen3", num_hidden_layers=3, eos_token_id=[1, 2, 5], use_sliding_window=True, sliding_window=8,
                       max_window_layers=1)  # fmt: skip
    assert model.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    with torch.no_grad():
        for end in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            end.weight.mul_(1e-4)
    ShortGPT().prune(model, WINDOWS, 0.34)
    assert model.config.layer_types == ["sliding_attention", "sliding_attention"]
    assert model.config.eos_token_id == [1, 2, 5]
