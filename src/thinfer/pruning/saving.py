"""A transformers model as a folder that loads anywhere."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinfer.errors import CheckFailed, UsageError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.pruning.tokenizer_files import carry_tokenizer
from thinfer.pruning.transformers_setup import forget_storage, quiet_transformers
from thinfer.pruning.writing import writing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_SIZE = "5GB"


def save_folder(
    model: PreTrainedModel,
    out: str | Path,
    *,
    source: Checkpoint | None = None,
    files: Mapping[str, str | bytes] | None = None,
    dtype: str | None = None,
) -> None:
    """Write an ordinary Hugging Face folder: dense safetensors, configuration, tokenizer and chat template.

    The folder appears whole, by a rename, or not at all. Shared weights stay shared.

    Args:
        model: what to save.
        out: the folder; it must not exist yet, or be empty.
        source: where tokenizer, chat template and generation settings are taken from.
        files: further files by name, such as README.md.
        dtype: precision of the saved weights ("float32", "bfloat16", "float16"); None: as they are. The weights of
            `model` itself are rounded to it, so that it and the folder are equal.

    Raises:
        UsageError: the folder exists, or cannot be made.
        ResourceError: the disk is full.

    Example:
        >>> save_folder(loaded.model, "pruned", source=loaded.checkpoint)  # doctest: +SKIP
    """
    target = require_new_folder(out)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for abandoned in target.parent.glob(f".{glob.escape(target.name)}.saving-*"):
            shutil.rmtree(abandoned, ignore_errors=True)  # of a run that was killed
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.saving-"))
        try:
            _fill(partial, model, source, files or {}, dtype)
            os.replace(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def round_weights(model: PreTrainedModel, dtype: str, *, remedy: str = "save with --save-dtype float32") -> None:
    """Round the weights to a precision, in place and in the type they have: as they will be saved.

    Args:
        model: to round.
        dtype: "float32", "bfloat16" or "float16".
        remedy: what the message advises.

    Raises:
        CheckFailed: a weight is too large for it, or is not finite.
    """
    import torch

    for name, value in model.named_parameters():
        if value.is_floating_point():
            value.data.copy_(value.data.to(getattr(torch, dtype)))
            if not torch.isfinite(value.data).all():
                raise CheckFailed(f"{name} has a weight that {dtype} cannot hold; {remedy}")


def require_new_folder(out: str | Path) -> Path:
    """The path, if a folder can appear there; UsageError says what is in the way. Asked before the work is done."""
    path = Path(out).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{out}: exists already; choose another -o, or delete it first")
    nearest = next(place for place in path.parents if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{nearest}: no folder, or no permission to write there; choose another -o")
    return path


def _fill(
    folder: Path,
    model: PreTrainedModel,
    source: Checkpoint | None,
    files: Mapping[str, str | bytes],
    dtype: str | None,
) -> None:
    with quiet_transformers(), _stored_as(model, dtype):
        _save_model(model, folder)
    if source is not None:
        carry_tokenizer(source, folder)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    umask = os.umask(0)
    os.umask(umask)
    # A temporary folder and the files of safetensors are private; the result is as readable as any other.
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        if path.is_file():
            _flush(path)


def _save_model(model: PreTrainedModel, folder: Path) -> None:
    import transformers

    forget_storage(model.config)
    make: Any = transformers.GenerationConfig
    # Settings that transformers finds contradictory cannot be saved; the checkpoint's own file is carried along.
    generation, model.generation_config = model.generation_config, make()
    try:
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    finally:
        model.generation_config = generation
    (folder / "generation_config.json").unlink(missing_ok=True)


@contextlib.contextmanager
def _stored_as(model: PreTrainedModel, dtype: str | None) -> Iterator[None]:
    """The floating parameters in another precision, each still the same object, so that ties stay."""
    import torch

    if dtype is None:
        yield
        return
    kept = {name: value.dtype for name, value in model.named_parameters() if value.is_floating_point()}
    values = dict(model.named_parameters())
    for name in kept:
        values[name].data = values[name].data.to(getattr(torch, dtype))
    try:
        yield
    finally:
        for name, original in kept.items():
            values[name].data = values[name].data.to(original)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
