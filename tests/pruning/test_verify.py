"""Zeros are counted and patterns checked on what is stored."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckpointError
from thinfer.pruning.verify import follows, verify
from tiny_llama import write_tiny_llama


def changed(folder, change):
    """Apply `change` to every matrix of the blocks, and write the folder again."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, values in tensors.items():
        if "layers" in name and values.ndim == 2:
            tensors[name] = np.ascontiguousarray(change(values.copy()))
    save_file(tensors, file)
    return tensors


def two_of_four(values):
    groups = values.reshape(-1, 4)
    groups[np.arange(len(groups))[:, None], np.argsort(np.abs(groups), axis=1)[:, :2]] = 0
    return values


def test_zeros_are_counted(tmp_path):
    folder = write_tiny_llama(tmp_path / "m")
    tensors = changed(folder, lambda values: np.where(np.abs(values) < 0.1, 0, values))
    found = verify(folder)
    assert str(found.pattern) == "unstructured"
    assert not found.problems
    matrices = {name: values for name, values in tensors.items() if "layers" in name and values.ndim == 2}
    assert {check.name for check in found.tensors} == set(matrices)
    for row in found.to_dict()["tensors"]:
        assert set(row) == {"name", "shape", "sparsity", "pattern_ok"}
        assert row["shape"] == list(matrices[row["name"]].shape)
        assert row["sparsity"] == pytest.approx((matrices[row["name"]] == 0).mean())
        assert row["pattern_ok"] is True
    total = sum((values == 0).sum() for values in matrices.values()) / sum(v.size for v in matrices.values())
    assert found.to_dict()["sparsity"] == pytest.approx(total)
    assert set(found.to_dict()) == {"tensors", "sparsity", "pattern"}


def test_a_pattern_is_found(tmp_path):
    folder = write_tiny_llama(tmp_path / "m")
    changed(folder, two_of_four)
    assert (str(verify(folder).pattern), verify(folder).sparsity) == ("2:4", 0.5)


def test_a_pattern_that_is_asked_for_is_checked(tmp_path):
    folder = write_tiny_llama(tmp_path / "m")
    changed(folder, two_of_four)
    # Whatever keeps 2 of 4 keeps 4 of 8.
    assert not verify(folder, SparsityPattern(4, 8)).problems
    found = verify(folder, SparsityPattern(1, 4))
    assert len(found.problems) == len(found.tensors) == 14
    assert not any(check.pattern_ok for check in found.tensors)


def test_a_weight_that_came_back_is_noticed(tmp_path):
    folder = write_tiny_llama(tmp_path / "m")
    tensors = changed(folder, two_of_four)
    name = "model.layers.0.mlp.up_proj"
    facts = {"zeros": int((tensors[f"{name}.weight"] == 0).sum()), "transposed": False}
    (folder / "report.json").write_text(json.dumps({"pattern": "2:4", "matrices": {name: facts}}))
    assert [check.name for check in verify(folder).tensors] == [f"{name}.weight"], "only what was pruned is listed"
    assert not verify(folder).problems
    refilled = tensors[f"{name}.weight"]
    refilled[0, :4] = 1
    save_file(tensors, folder / "model.safetensors")
    problems = verify(folder).problems
    assert len(problems) == 2
    assert "does not follow 2:4" in problems[0]
    assert "its report says" in problems[1]


def test_patterns_run_along_the_inputs_of_transposed_matrices(tmp_path):
    folder = write_tiny_llama(tmp_path / "m")
    tensors = changed(folder, lambda values: two_of_four(np.ascontiguousarray(values.T)).T)
    names = [name.removesuffix(".weight") for name, v in tensors.items() if "layers" in name and v.ndim == 2]
    report = {"pattern": "2:4", "matrices": {name: {"transposed": True} for name in names}}
    assert verify(folder, SparsityPattern(2, 4)).problems
    (folder / "report.json").write_text(json.dumps(report))
    assert not verify(folder).problems


def test_follows():
    values = np.array([[1.0, 0, 2, 0, 0, 0, 3, 4]])
    assert follows(values, SparsityPattern(2, 4))
    assert not follows(values, SparsityPattern(1, 4))
    assert not follows(values, SparsityPattern(2, 3)), "the rows are no multiple of 3"
    assert follows(values, SparsityPattern())


def test_a_folder_that_is_no_model_is_an_error(tmp_path):
    with pytest.raises(CheckpointError):
        verify(tmp_path)
