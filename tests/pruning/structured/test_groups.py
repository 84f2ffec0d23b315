"""The groups that marks find are those that changing one weight row after another finds."""

import pytest
import torch

from pruning.structured_models import GQA, full_model
from pruning.tiny_decoders import tiny_windows
from thinfer.errors import UnsupportedError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.structured.groups import find_groups, linear_modules, weight_of

ONE = {"num_hidden_layers": 1}


def reads(model, block, ids):
    """Input of every linear module of a block, by name, [tokens, inputs]."""
    found, handles = {}, []
    for name, module in linear_modules(block).items():
        handles.append(
            module.register_forward_pre_hook(lambda _, args, name=name: found.update({name: args[0].clone()}))
        )
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: x.reshape(-1, x.shape[-1]) for name, x in found.items()}


def columns_by_row(model, producer, reader):
    """Columns of `reader` that change when one row of `producer` does: row -> set of columns."""
    block, ids = find_stack(model).blocks[0].module, tiny_windows(4, 8)
    weight = weight_of(linear_modules(block)[producer])
    dense, found = reads(model, block, ids)[reader], {}
    for row in range(len(weight)):
        old = weight[row].clone()
        with torch.no_grad():
            weight[row] = old * -3 + 1
        found[row] = set((reads(model, block, ids)[reader] != dense).any(0).nonzero().flatten().tolist())
        with torch.no_grad():
            weight[row] = old
    return found


@pytest.mark.parametrize(
    ("architecture", "changes", "heads"),
    [
        ("llama", GQA | ONE, 2),
        ("qwen3", ONE, 2),
        ("bloom", {"n_layer": 1}, 4),
        ("gpt_neox", ONE, 4),
        ("falcon", ONE | {"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ("gpt2", {"n_layer": 1}, 4),
        ("opt", ONE, 4),
        ("phi", ONE, 4),
        ("mixtral", ONE, 2),
    ],
)
def test_changing_a_row_changes_the_columns_of_its_unit_and_no_others(architecture, changes, heads):
    model = full_model(architecture, **changes)
    layout = find_groups(model)
    kinds = [family.kind for family in layout.families]
    assert kinds == (["heads"] if architecture == "mixtral" else ["heads", "neurons"])
    assert layout.families[0].units == heads
    for family in layout.families:
        reached = torch.zeros(family.units)
        for producer, rows in family.rows.items():
            changed = columns_by_row(model, producer, family.reader)
            assert sorted(rows.flatten().tolist()) == sorted(row for row, columns in changed.items() if columns)
            for unit, own in enumerate(rows.tolist()):
                columns = set(family.columns[unit].tolist())
                touched = set().union(*(changed[row] for row in own))
                assert touched <= columns
                reached[unit] += len(touched) / len(columns)
        assert (reached >= 1).all()  # the units are no larger than they must be
        assert sorted(family.columns.flatten().tolist()) == list(range(family.columns.numel()))


def test_the_model_is_left_as_it_was():
    model = full_model("llama", **GQA).train()
    model.model.embed_tokens.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    before = {name: p.clone() for name, p in model.named_parameters()}
    find_groups(model)
    assert model.training
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_also_reaches_the_residual_stream_is_no_unit():
    model = full_model("llama", intermediate_size=32)
    for layer in model.model.layers:
        mlp = layer.mlp

        def forward(x, mlp=mlp):
            gate = mlp.gate_proj(x)
            return mlp.down_proj(gate.sigmoid() * mlp.up_proj(x)) + gate

        mlp.forward = forward
    layout = find_groups(model)
    assert [family.kind for family in layout.families] == ["heads"]
    with pytest.raises(UnsupportedError, match=r"mlp.down_proj: what it reads also reaches the block's output"):
        layout.of_kind("neurons")


def test_blocks_that_differ_are_refused():
    model = full_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x).sigmoid() * mlp.up_proj(x).flip(-1))
    with pytest.raises(
        UnsupportedError, match=r"model.layers.1.mlp.down_proj is not built as the one of model.layers.0"
    ):
        find_groups(model)


def test_a_shut_relu_hides_no_neuron():
    model = full_model("opt")
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.fc1.bias.fill_(-100)
    assert [family.units for family in find_groups(model).of_kind("neurons")] == [64]


def test_half_precision_finds_the_same():
    expected = find_groups(full_model("llama", **GQA))
    found = find_groups(full_model("llama", **GQA).bfloat16())
    for a, b in zip(expected.families, found.families, strict=True):
        assert (a.kind, a.reader) == (b.kind, b.reader)
        assert torch.equal(a.columns, b.columns)
        assert all(torch.equal(a.rows[name], b.rows[name]) for name in a.rows)
