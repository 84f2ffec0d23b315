import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from thinfer import LLM, SamplingParams
from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.formats.compressed_tensors import sparsity_format
from tiny_llama import write_tiny_llama

BITMASK, HALF = "sparse-bitmask", "sparse-24-bitmask"


def mask_of(weight: torch.Tensor, form: str) -> torch.Tensor:
    """What is stored: the values that are not zero, or the two largest of every four."""
    if form == BITMASK:
        return weight != 0
    groups = weight.float().abs().reshape(-1, 4)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    mask.scatter_(1, groups.argsort(dim=1, descending=True, stable=True)[:, :2], True)
    return mask.reshape(weight.shape)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Eight columns a byte, the first column in the lowest bit."""
    rows, columns = mask.shape
    packed = torch.zeros(rows, -(-columns // 8), dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            packed[row, column // 8] |= int(mask[row, column]) << column % 8
    return packed


def compress(name: str, weight: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    """The stored parts of a matrix, as the library's versions up to 0.14 name them."""
    mask = mask_of(weight, form)
    values = weight[mask]
    if form == HALF:
        stem = name.removesuffix(".weight")
        return {
            f"{stem}.shape": torch.tensor(weight.shape).reshape(-1, 1),
            f"{stem}.compressed": values.reshape(len(weight), -1),
            f"{stem}.bitmask": pack(mask),
        }
    counts = mask.sum(dim=1)
    return {
        f"{name}.shape": torch.tensor(weight.shape),
        f"{name}.compressed": values,
        f"{name}.bitmask": pack(mask),
        f"{name}.row_offsets": torch.cumsum(counts, 0) - counts,
    }


def write(folder: Path, dense: dict[str, torch.Tensor], form: str, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in dense.items():
        compressed = weight.ndim == 2 and "layers" in name
        stored |= compress(name, weight, form) if compressed else {name: weight}
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    sparsity = {"format": form, "targets": ["Linear"], "ignore": ["lm_head"], "global_sparsity": 0.5}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "sparsity_config": sparsity}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def matrices(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(6, 20, generator=generator)
    # Not a product: that would make negative zeros, whose sign no form keeps.
    half = torch.where(mask_of(full, HALF), full, 0.0)
    few = torch.where(torch.rand(5, 12, generator=generator) < 0.2, 1.5, 0.0)
    named = {"model.layers.0.a.weight": half, "model.layers.0.b.weight": few * 0, "model.layers.1.a.weight": few}
    named |= {"model.norm.weight": torch.ones(3), "lm_head.weight": full}
    return {name: value.to(dtype) for name, value in named.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [BITMASK, HALF])
def test_every_tensor_comes_back_bit_by_bit(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    dense = matrices(dtype)
    if form == HALF:
        dense["model.layers.1.a.weight"] *= mask_of(dense["model.layers.1.a.weight"], HALF)
    checkpoint = open_checkpoint(write(tmp_path / "m", dense, form, {"model_type": "llama"}))
    assert set(checkpoint.tensors) == set(dense)
    for name, weight in dense.items():
        info = checkpoint.tensors[name]
        expected = weight.contiguous().view(torch.uint8).reshape(info.rows, -1).numpy()
        assert info.shape == tuple(weight.shape)
        np.testing.assert_array_equal(checkpoint.raw(name), expected)
        np.testing.assert_array_equal(checkpoint.decode(name), weight.float().numpy())
        assert not checkpoint.raw(name).flags.writeable
        checkpoint.release(name)
    assert checkpoint.metadata == {"model_type": "llama"}
    assert len(checkpoint.fingerprint()) == 64
    checkpoint.close()


@pytest.mark.parametrize("form", [BITMASK, HALF, "dense"])
def test_the_engine_runs_it_like_the_dense_model(tmp_path: Path, form: str) -> None:
    folder = write_tiny_llama(tmp_path / "dense")
    dense = load_file(folder / "model.safetensors")
    for name, weight in dense.items():
        if weight.ndim == 2 and "layers" in name:
            dense[name] = weight * mask_of(weight, HALF)
    save_file(dense, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    sparse = tmp_path / "sparse"
    sparse.mkdir()
    for file in folder.glob("token*.json"):
        (sparse / file.name).write_bytes(file.read_bytes())
    write(sparse, dense, form, config)
    if form == "dense":
        save_file(dense, sparse / "model.safetensors")
    texts = []
    for path in (folder, sparse):
        with LLM(path, executor="reference") as llm:
            texts.append(llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=12)).token_ids)
    assert texts[0] == texts[1]
    if form == BITMASK:
        smaller = (sparse / "model.safetensors").stat().st_size
        assert smaller < (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("bitmask", None, r"a\.weight\.bitmask is missing"),
        ("row_offsets", None, r"row_offsets is missing"),
        ("shape", lambda t: t.int(), "its shape has type I32"),
        ("shape", lambda t: t[:1], "its shape .* is not that of a matrix"),
        ("shape", lambda t: -t, "its shape .* is not that of a matrix"),
        ("shape", lambda t: t * 2, "its bitmask is U8 of shape"),
        ("bitmask", lambda t: t.char(), "its bitmask is I8"),
        ("bitmask", lambda t: t | 8, "its bitmask has bits behind the last column"),
        ("bitmask", lambda t: t & 1, "its bitmask has .* bits for .* values"),
        ("row_offsets", lambda t: t + 1, "row offsets do not fit"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, part: str, change: Any, message: str) -> None:
    weight = torch.ones(3, 11)
    weight[:, ::2] = 0
    folder = write(tmp_path / "m", {"model.layers.0.a.weight": weight}, BITMASK, {})
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.a.weight.{part}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).raw("model.layers.0.a.weight")


def test_other_forms(tmp_path: Path) -> None:
    weight = torch.ones(4, 8)
    folder = write(tmp_path / "m", {"model.layers.0.a.weight": weight}, BITMASK, {})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["sparsity_config"]["format"] = "marlin-24"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedError, match="sparsity format 'marlin-24' is not supported; supported are sparse-bit"
    ):
        open_checkpoint(folder)
    # Quantised as well: the models' room refuses it by its own name.
    config["quantization_config"]["config_groups"] = {"group_0": {}}
    assert sparsity_format(config) is None
    assert sparsity_format({"sparsity_config": {"format": BITMASK}}) == BITMASK
    assert sparsity_format({"model_type": "llama"}) is None
    assert sparsity_format({"quantization_config": "x", "sparsity_config": 3}) is None

    eights = write(tmp_path / "f8", {"model.layers.0.a.weight": weight}, BITMASK, {})
    tensors = load_file(eights / "model.safetensors")
    key = "model.layers.0.a.weight.compressed"
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    save_file(tensors, eights / "model.safetensors")
    with pytest.raises(UnsupportedError, match="values of type F8_E4M3; supported are F32"):
        open_checkpoint(eights).raw("model.layers.0.a.weight")

    both = write(tmp_path / "both", {"model.layers.0.a.weight": weight}, BITMASK, {})
    tensors = load_file(both / "model.safetensors") | {"model.layers.0.a.weight": weight}
    save_file(tensors, both / "model.safetensors")
    with pytest.raises(CheckpointError, match="both dense and compressed"):
        open_checkpoint(both)
