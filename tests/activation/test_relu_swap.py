"""The activation that is replaced, in memory and in the configuration, and the fit after it."""

import copy

import pytest
import torch

from pruning.tiny_decoders import tiny_model, tiny_windows
from thinfer.activation.refit import refit_down
from thinfer.activation.relu_swap import ReluSwap, ZeroMeter, find_ffns
from thinfer.errors import CheckFailed, UnsupportedError

SAME = {"rtol": 1e-4, "atol": 1e-4}


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2", "phi", "falcon", "gpt_neox"]
)
def test_the_result_is_an_ordinary_relu_model(architecture):
    ids, model = tiny_windows(2, 12), tiny_model(architecture)
    dense = logits(model, ids)
    swap = ReluSwap(model, 1)
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(logits(plain, ids), logits(model, ids), **SAME)
    assert not torch.allclose(logits(model, ids), dense, atol=1e-2)
    meter = ZeroMeter(swap.ffns)
    with meter.counting():
        logits(model, ids)
    assert all(0.2 < share < 0.8 for share in meter.shares())
    assert len(meter.shares()) == model.config.num_hidden_layers
    swap.set(0.0)
    assert torch.allclose(logits(model, ids), dense, **SAME)


def test_halfway_is_between():
    model = tiny_model("llama")
    ReluSwap(model, 1).set(0.25)
    blend, x = model.model.layers[0].mlp.act_fn, torch.linspace(-3, 3, 7)
    assert torch.allclose(blend(x), 0.75 * torch.nn.functional.silu(x) + 0.25 * x.clamp_min(0))


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_a_shift_is_a_bias_that_any_reader_knows(architecture):
    changes = {"activation_function": "gelu"} if architecture == "opt" else {}
    model, ids = tiny_model(architecture, **changes), tiny_windows(2, 12)
    dense = logits(model, ids)
    x = torch.randn(3, 32)
    gates = [find_ffns(model)[0].gate]
    before = gates[0](x).detach()
    swap = ReluSwap(model, 1, shift=0.3)
    ffn = swap.ffns[0]
    activated = getattr(ffn.holder, ffn.name)(ffn.gate(x))
    assert torch.allclose(activated, (before - 0.3).clamp_min(0), atol=1e-5)
    shifted = logits(model, ids)
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(logits(plain, ids), shifted, **SAME)
    swap.set(0.0)
    assert torch.allclose(logits(model, ids), dense, **SAME)


def test_stage_2_puts_relu_behind_the_norms_and_says_so():
    model, ids = tiny_model("llama"), tiny_windows(2, 12)
    dense = logits(model, ids)
    swap = ReluSwap(model, 2)
    inputs = []
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    logits(model, ids)
    assert all(0.2 < (x == 0).double().mean() < 0.8 and x.min() == 0 for x in inputs)
    assert '"model_type": "relufied_llama"' in swap.config_file()
    assert '"norm_act": "relu"' in swap.config_file()
    swap.set(0.0)
    assert torch.allclose(logits(model, ids), dense, **SAME)
    with pytest.raises(UnsupportedError, match="stage 2 is built for llama"):
        ReluSwap(tiny_model("phi"), 2)
    assert ReluSwap(tiny_model("phi"), 1).config_file() is None


def test_what_cannot_be_expressed_is_refused():
    with pytest.raises(UnsupportedError, match="one dense FFN a block"):
        ReluSwap(tiny_model("mixtral"), 1)
    with pytest.raises(UnsupportedError, match="--shift needs FFNs with biases"):
        ReluSwap(tiny_model("qwen2"), 1, shift=0.1)
    with pytest.raises(UnsupportedError, match="does not name its activation"):
        ReluSwap(tiny_model("bloom"), 1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_fitting_brings_the_hidden_states_back(architecture):
    changes = {"activation_function": "gelu"} if architecture == "gpt2" else {}
    dense = tiny_model(architecture, **changes).eval()
    student = copy.deepcopy(dense)
    swap = ReluSwap(student, 1)
    windows = [tiny_windows(4, 24, seed=seed) for seed in range(8)]
    unseen = tiny_windows(8, 24, seed=99)
    before = (logits(student, unseen) - logits(dense, unseen)).norm()
    errors = refit_down(student, dense, swap.ffns, windows)
    assert len(errors) == 3
    assert all(error["after"] < error["before"] for error in errors)
    assert (logits(student, unseen) - logits(dense, unseen)).norm() < 0.8 * before
    assert [parameter.requires_grad for parameter in student.parameters()] == [True] * len(list(student.parameters()))


def test_the_fit_is_the_ridge_regression():
    """One block: the closed form of its objective, by an independent least-squares solver."""
    dense = tiny_model("llama", num_hidden_layers=1).eval()
    student = copy.deepcopy(dense)
    swap = ReluSwap(student, 1)
    ids = tiny_windows(6, 24)
    seen = {}
    student.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.update(a=args[0]))
    states = []
    for model in (dense, student):
        model.model.layers[0].register_forward_hook(
            lambda m, args, out: states.append(out if torch.is_tensor(out) else out[0])
        )
        logits(model, ids)
    h, given = (state.flatten(0, 1).double() for state in states[:2])
    scale = 1 / h.norm(dim=1, keepdim=True)
    a, e = seen["a"].flatten(0, 1).double() * scale, (h - given) * scale
    ridge = (0.01 * (a.T @ a).diagonal().mean()).sqrt()
    rows = torch.cat([a, ridge * torch.eye(a.shape[1], dtype=torch.double)])
    wanted = torch.linalg.lstsq(rows, torch.cat([e, torch.zeros(a.shape[1], e.shape[1])])).solution.T
    before = student.model.layers[0].mlp.down_proj.weight.detach().clone()
    refit_down(student, dense, swap.ffns, [ids])
    change = (student.model.layers[0].mlp.down_proj.weight - before).double()
    assert torch.allclose(change, wanted, atol=1e-3 * float(wanted.abs().max()))


def test_states_that_are_not_finite_are_refused():
    dense = tiny_model("llama").eval()
    student = copy.deepcopy(dense)
    swap = ReluSwap(student, 1)
    with torch.no_grad():
        student.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(CheckFailed, match="not finite"):
        refit_down(student, dense, swap.ffns, [tiny_windows(2, 16)])
