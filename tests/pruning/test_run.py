"""A whole run: what it writes, that it resumes to the same bits, and what its report says."""

import json

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from formats.test_compressed_tensors import BITMASK, write
from pruning.tiny_decoders import tiny_model
from thinfer.calibration.text import cut_windows
from thinfer.data import evaluation_text
from thinfer.errors import ArtifactError, ResourceError, UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.pruning import run as module
from thinfer.pruning import saving
from thinfer.pruning.checkpoint import load_torch
from thinfer.pruning.estimate import estimate
from thinfer.pruning.quality import torch_perplexity
from thinfer.pruning.recipe import make_recipe
from thinfer.pruning.run import partial_folder, prune
from thinfer.pruning.saving import save_folder
from thinfer.pruning.verify import verify
from tiny_llama import write_tiny_llama

QUICK = {"samples": 4, "seqlen": 64, "eval_windows": 2, "eval_ctx": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("run") / "dense")


def recipe_of(folder, **given):
    return make_recipe({"model": str(folder), **QUICK, **given})


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_run_writes_a_folder_with_all_that_belongs_to_it(folder, tmp_path):
    report = prune(recipe_of(folder, sparsity=0.5), tmp_path / "out")
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "recipe.yaml",
        "report.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((out / "report.json").read_text()) == report
    assert not partial_folder(out).exists()
    found = verify(out)
    assert found.sparsity == report["sparsity"] == 0.5
    assert not found.problems
    assert len(found.tensors) == 14
    # What is not in blocks is as it was.
    for name, values in weights(folder).items():
        assert ("proj" in name) != np.array_equal(values, weights(out)[name]), name


def test_the_report_says_what_was_done_and_how_it_was_measured(folder, tmp_path):
    report = prune(recipe_of(folder, sparsity=0.5, method="sparsegpt"), tmp_path / "out")
    assert report["method"].items() >= {"name": "sparsegpt", "block": 128, "damping": 0.01}.items()
    assert report["calibration"].items() >= {"samples": 4, "seqlen": 64, "tokens": 256, "bos": True, "seed": 0}.items()
    assert len(report["calibration"]["sha256"]) == 64
    dataset = report["perplexity"]["dataset"]
    assert dataset.items() >= {"ctx": 64, "windows": 2, "stride": 1, "bos": True}.items()
    for where, when in ((folder, "before"), (tmp_path / "out", "after")):
        loaded = load_torch(where)
        windows = cut_windows(loaded.encode(evaluation_text()), 64, 2)
        measured = torch_perplexity(loaded.model, windows, bos_id=loaded.bos_id)
        assert report["perplexity"][when]["ppl"] == pytest.approx(measured.ppl, rel=1e-6)
    assert set(report["phases"]) >= {"load", "evaluate before", "statistics", "prune", "replay", "evaluate after"}
    assert all(facts["peak_bytes"] > 1e6 and facts["seconds"] >= 0 for facts in report["phases"].values())
    assert len(report["matrices"]) == 14
    for facts in report["matrices"].values():
        assert facts["zeros"] == facts["rate"] * np.prod(facts["shape"])
        assert 0 < facts["layer_error"] < 1
    assert report["speed"]["accelerated_by"] == "none", "dense zeros make nothing faster, and the report says so"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "sparsegpt" in card
    assert str(folder) not in card, "a card is public, a path is not"


def test_its_recipe_makes_the_same_bits_again(folder, tmp_path):
    prune(recipe_of(folder, sparsity=0.4, method="ria", seed=3), tmp_path / "a")
    prune(make_recipe({}, tmp_path / "a" / "recipe.yaml"), tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    prune(recipe_of(folder, sparsity=0.4, method="ria", seed=4), tmp_path / "c")
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c")), "other windows, another mask"


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_an_interrupted_run_goes_on_to_the_same_bits(folder, tmp_path, method):
    recipe = recipe_of(folder, sparsity=0.5, method=method, allocation="owl")
    prune(recipe, tmp_path / "whole")

    def stop(done, total, what):
        if total and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(recipe, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    assert partial_folder(tmp_path / "out").is_dir()
    told = []
    report = prune(recipe, tmp_path / "out", progress=lambda done, total, what: told.append(what))
    assert report["resumed_blocks"] == 1
    assert not any(line.startswith("before") for line in told), "what was measured before is not measured again"
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "out"))
    assert not partial_folder(tmp_path / "out").exists()


def test_unfinished_work_of_another_recipe_is_refused(folder, tmp_path):
    def stop(done, total, what):
        if total and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(recipe_of(folder, sparsity=0.5), tmp_path / "out", progress=stop)
    with pytest.raises(ArtifactError, match="another recipe"):
        prune(recipe_of(folder, sparsity=0.6), tmp_path / "out")


def test_only_the_targets_are_pruned(folder, tmp_path):
    report = prune(recipe_of(folder, pattern="2:4", target=["*.mlp.*"], ignore=["*.down_proj"]), tmp_path / "out")
    before, after = weights(folder), weights(tmp_path / "out")
    for name in before:
        assert ("gate_proj" in name or "up_proj" in name) != np.array_equal(before[name], after[name]), name
    found = verify(tmp_path / "out")
    assert (str(found.pattern), found.sparsity, len(found.tensors)) == ("2:4", 0.5, 4)
    assert report["sparsity"] == 0.5 > report["sparsity_of_blocks"]


def test_targets_that_match_nothing_fail_before_any_work(folder, tmp_path):
    with pytest.raises(UsageError, match="matches no matrix"):
        prune(recipe_of(folder, sparsity=0.5, target=["layers\\d*$"]), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("run", [prune, lambda recipe, out: estimate(recipe)])
def test_a_pattern_that_does_not_fit_fails_before_any_work(folder, tmp_path, monkeypatch, run):
    monkeypatch.setattr(module, "torch_perplexity", None)
    with pytest.raises(UsageError, match=r"no multiple of 7; choose a pattern other than 3:7"):
        run(recipe_of(folder, pattern="3:7"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_failure_names_the_matrix_and_leaves_nothing_where_no_block_is_finished(folder, tmp_path):
    given = {"method": "sparsegpt", "set": {"bits": 4, "group": 7}, "evaluate": False}
    with pytest.raises(UsageError, match=r"^model\.layers\.0\.self_attn\.q_proj: group 7"):
        prune(recipe_of(folder, sparsity=0.5, **given), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_blocks_and_the_same_run_ends_later(folder, tmp_path, monkeypatch):
    recipe = recipe_of(folder, sparsity=0.5, method="magnitude", evaluate=False)
    abandoned = tmp_path / ".out.saving-killed"
    abandoned.mkdir()

    def full(model, place):
        (place / "model.safetensors").touch()
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(saving, "_save_model", full)
        with pytest.raises(ResourceError, match="out: cannot be written"):
            prune(recipe, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert prune(recipe, tmp_path / "out")["resumed_blocks"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_sparsity_0_changes_nothing(folder, tmp_path):
    prune(recipe_of(folder, sparsity=0.0), tmp_path / "out")
    assert same(weights(folder), weights(tmp_path / "out"))


def test_short_documents_are_packed_and_many_samples_work(folder, tmp_path):
    text = tmp_path / "short.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"Document {i} is short."}) for i in range(500)))
    report = prune(recipe_of(folder, sparsity=0.5, text=str(text), samples=129, evaluate=False), tmp_path / "out")
    assert report["calibration"].items() >= {"source": "short.jsonl", "samples": 129, "tokens": 129 * 64}.items()
    assert "perplexity" not in report


def test_windows_are_no_longer_than_the_model_allows(folder, tmp_path):
    report = prune(recipe_of(folder, sparsity=0.5, seqlen=100_000, samples=1, evaluate=False), tmp_path / "out")
    assert report["calibration"]["seqlen"] == 512
    assert any("longest context" in note for note in report["notes"])


def test_without_samples_the_shipped_text_gives_what_it_has(folder, tmp_path):
    report = prune(recipe_of(folder, sparsity=0.5, samples=None, seqlen=512, evaluate=False), tmp_path / "out")
    assert report["calibration"]["samples"] == 128
    assert make_recipe({}, tmp_path / "out" / "recipe.yaml").samples == 128


def test_too_short_a_text_says_how_much_is_missing(folder, tmp_path):
    (tmp_path / "t.txt").write_text("too short")
    with pytest.raises(UsageError, match=r"t\.txt has 9 tokens, 128 windows of 64 need"):
        prune(recipe_of(folder, sparsity=0.5, text=str(tmp_path / "t.txt"), samples=None), tmp_path / "out")


def test_a_large_loss_is_said(folder, tmp_path):
    report = prune(recipe_of(folder, sparsity=0.95), tmp_path / "out")
    before, after = (report["perplexity"][when]["ppl"] for when in ("before", "after"))
    assert after > 1.5 * before, "else this test shows nothing"
    assert any("perplexity rose from" in note and "recover" in note for note in report["notes"])


def test_magnitude_needs_no_text_and_no_tokenizer(tmp_path):
    folder = write_tiny_llama(tmp_path / "dense")
    (folder / "tokenizer.json").unlink()
    report = prune(recipe_of(folder, sparsity=0.5, method="magnitude", evaluate=False), tmp_path / "out")
    assert "calibration" not in report
    assert verify(tmp_path / "out").sparsity == 0.5


def test_the_curves_of_a_sensitivity_scan_are_kept_and_plotted(folder, tmp_path):
    report = prune(recipe_of(folder, sparsity=0.5, allocation="sensitivity", evaluate=False), tmp_path / "out")
    (scan,) = report["allocation"]["scans"]
    assert set(scan["curves"]) >= {"mlp.down_proj", "self_attn.q_proj"}
    assert "<svg" in (tmp_path / "out" / "sensitivity.svg").read_text()


@pytest.mark.parametrize("method", ["flap", "llm-pruner", "shortgpt"])
def test_structured_methods_write_a_smaller_ordinary_model(folder, tmp_path, method):
    sparsity = 0.5 if method == "shortgpt" else 0.2
    options = {} if method == "shortgpt" else {"round_to": 1}
    report = prune(recipe_of(folder, sparsity=sparsity, method=method, set=options), tmp_path / "out")
    assert report["parameters"]["after"] < report["parameters"]["before"]
    assert report["sparsity"] == pytest.approx(sparsity, abs=0.1)
    sizes = [
        sum(info.nbytes for info in open_checkpoint(place).tensors.values()) for place in (folder, tmp_path / "out")
    ]
    assert sizes[1] == report["bytes"] < sizes[0]
    loaded = load_torch(tmp_path / "out")
    windows = cut_windows(loaded.encode(evaluation_text()), 64, 2)
    measured = torch_perplexity(loaded.model, windows, bos_id=loaded.bos_id).ppl
    assert measured == pytest.approx(report["perplexity"]["after"]["ppl"], rel=1e-5)


@pytest.mark.parametrize("given", [{"method": "wanda"}, {"method": "magnitude"}, {"method": "shortgpt"}])
def test_the_prediction_has_the_size_of_the_result(folder, tmp_path, given):
    recipe = recipe_of(folder, sparsity=0.5, **given)
    predicted = estimate(recipe)
    report = prune(recipe, tmp_path / "out")
    assert predicted["size_bytes"] == pytest.approx(report["bytes"], rel=0.01)
    assert predicted["memory_bytes"]["model"] == report["parameters"]["before"] * 4
    assert predicted["seconds"]["total"] > 0
    if given["method"] == "wanda":
        assert predicted["calibration"]["tokens"] == report["calibration"]["tokens"]


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "gpt2"])
def test_experts_and_transposed_matrices_are_verified_as_they_are_stored(tmp_path, architecture):
    save_folder(tiny_model(architecture), tmp_path / "dense")
    recipe = make_recipe({"model": str(tmp_path / "dense"), "pattern": "2:4", "method": "magnitude", "evaluate": False})
    report = prune(recipe, tmp_path / "out")
    assert report["sparsity"] == 0.5
    found = verify(tmp_path / "out")
    assert (str(found.pattern), found.sparsity, found.problems) == ("2:4", 0.5, ())
    stored = sum(check.size for check in found.tensors)
    assert stored == sum(int(np.prod(facts["shape"])) for facts in report["matrices"].values())


def test_an_export_of_old_in_a_sparse_format_can_be_pruned_further(folder, tmp_path):
    dense = {name: torch.from_numpy(values) for name, values in weights(folder).items()}
    for name, values in dense.items():
        if values.ndim == 2 and "layers" in name:
            dense[name] = torch.where(values.abs() < 0.05, 0.0, values)
    sparse = write(tmp_path / "sparse", dense, BITMASK, json.loads((folder / "config.json").read_text()))
    loaded = load_torch(sparse).model
    assert all(torch.equal(value, dense[name]) for name, value in loaded.named_parameters())
    prune(
        make_recipe({"model": str(sparse), "sparsity": 0.5, "method": "magnitude", "evaluate": False}), tmp_path / "o"
    )
    assert verify(tmp_path / "o").sparsity == 0.5
    assert "quantization_config" not in (tmp_path / "o" / "config.json").read_text()
