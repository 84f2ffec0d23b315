"""A stored model as a transformers model, and a transformers model as a folder that loads anywhere."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinfer.errors import CheckFailed, CheckpointError, ThinferError, UnsupportedError, UsageError
from thinfer.formats.checkpoint import Checkpoint, open_checkpoint
from thinfer.formats.compressed_tensors import CompressedCheckpoint
from thinfer.pruning.writing import writing
from thinfer.text.chat import stored_templates
from thinfer.text.gguf_tokenizer import build_tokenizer
from thinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16")
SHARD_SIZE = "5GB"

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CARRIED = (
    "tokenizer*.json",
    "tokenizer.model",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "generation_config.json",
    "LICENSE*",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model to prune or train, and the checkpoint it came from.

    Attributes:
        model: the transformers model, in evaluation mode.
        checkpoint: where it was stored; tokenizer, chat template and fingerprint are its.
        ref: what the user called it.
        save_dtype: the precision its result is saved in unless another is asked for.
        notes: what the user should know, such as that the weights were dequantised.
    """

    model: PreTrainedModel
    checkpoint: Checkpoint
    ref: str
    save_dtype: str
    notes: tuple[str, ...]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; made when first asked for, as pruning by magnitude needs none."""
        return Tokenizer.from_checkpoint(self.checkpoint)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.tokenizer.encode(text, add_special=False)

    @property
    def bos_id(self) -> int | None:
        """The begin token, where the model wants every text to start with it."""
        return self.tokenizer.bos_id if self.tokenizer.adds_bos else None


def require_torch() -> None:
    """Raise UsageError unless PyTorch and transformers can be imported."""
    from importlib.util import find_spec

    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UsageError("pruning needs PyTorch and transformers: pip install 'thinfer[prune]'")


def require_device(device: str) -> None:
    """Raise UsageError unless PyTorch can run on the device: cpu, cuda or cuda:N."""
    import torch

    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r}: write cpu, cuda or cuda:1")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {device}: PyTorch finds no such CUDA device here; use --device cpu")


def load_torch(ref: str | Path, *, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """Load a model into transformers, on the CPU; blocks go to another device one at a time.

    Args:
        ref: a Hugging Face folder, a .gguf file (its weights are dequantised), or a hub id.
        dtype: precision in memory; auto is float32 for the CPU, and bfloat16 elsewhere where the model is stored in
            16 bits.
        device: where it will run; decides what auto is.

    Raises:
        UsageError: PyTorch is missing, or an unknown dtype.
        CheckpointError: the model is missing, corrupt or incomplete.
        UnsupportedError: not a decoder that transformers knows, or weights quantised in a way it cannot undo.

    Example:
        >>> load_torch("model.gguf").model.num_parameters()  # doctest: +SKIP
        134515008
    """
    checkpoint, save_dtype, memory_dtype, notes = _open(ref, dtype, device)
    load = _load_gguf if checkpoint.kind == "gguf" else _load_folder
    with _quiet_transformers():
        model = load(checkpoint, memory_dtype)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{ref}: an encoder-decoder; decoders can be pruned")
    model.train(False)
    return LoadedModel(model, checkpoint, str(ref), save_dtype, notes)


def load_skeleton(ref: str | Path, *, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """The same as `load_torch` without any weights: shapes and names on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint, save_dtype, memory_dtype, notes = _open(ref, dtype, device)
    with _quiet_transformers(), _loading(checkpoint.path), torch.device("meta"):
        make: Any = AutoModelForCausalLM
        model = make.from_config(_config(checkpoint), dtype=memory_dtype)
    return LoadedModel(model, checkpoint, str(ref), save_dtype, notes)


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


def round_weights(model: PreTrainedModel, dtype: str) -> None:
    """Round the weights to a precision, in place and in the type they have: as they will be saved.

    Raises:
        CheckFailed: a weight is too large for it, or is not finite.
    """
    import torch

    for name, value in model.named_parameters():
        if value.is_floating_point():
            value.data.copy_(value.data.to(getattr(torch, dtype)))
            if not torch.isfinite(value.data).all():
                raise CheckFailed(f"{name} has a weight that {dtype} cannot hold; save with --save-dtype float32")


def require_new_folder(out: str | Path) -> Path:
    """The path, if a folder can appear there; UsageError says what is in the way. Asked before the work is done."""
    path = Path(out).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{out}: exists already; choose another -o, or delete it first")
    nearest = next(place for place in path.parents if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{nearest}: no folder, or no permission to write there; choose another -o")
    return path


def carry_tokenizer(source: Checkpoint, folder: Path) -> None:
    """Put the tokenizer, the chat template and the generation settings of a checkpoint into a folder."""
    if source.kind == "hf":
        for pattern in _CARRIED:
            for file in source.path.glob(pattern):
                place = folder / file.relative_to(source.path)
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, place)
        return
    built = build_tokenizer(source.metadata, str(source.path))
    frame = _frame(built.backend, built.bos_id if built.add_bos else None, built.eos_ids[0] if built.add_eos else None)
    if frame is not None:
        built.backend.post_processor = frame
    built.backend.save(str(folder / "tokenizer.json"))
    templates = stored_templates(source)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": built.add_bos,
        "add_eos_token": built.add_eos,
        **built.named,
    }
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    _write_json(folder / "tokenizer_config.json", config)
    ends = list(built.eos_ids)
    ids = {"bos_token_id": built.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    _write_json(folder / "generation_config.json", {name: value for name, value in ids.items() if value is not None})


def _open(ref: str | Path, dtype: str, device: str) -> tuple[Checkpoint, str, torch.dtype, tuple[str, ...]]:
    """The checkpoint, the precision to save in, the precision in memory, and what the user should know."""
    require_torch()
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    import torch

    checkpoint = open_checkpoint(ref)
    stored = Counter[str]()
    for info in checkpoint.tensors.values():
        stored[info.type] += info.nbytes
    main = stored.most_common(1)[0][0] if stored else "F32"
    save_dtype = _STORED_DTYPES.get(main, "float32")
    if dtype == "auto":
        dtype = "bfloat16" if device != "cpu" and save_dtype != "float32" else "float32"
    notes = []
    quantised = sorted(kind for kind in stored if kind not in _STORED_DTYPES)
    if checkpoint.kind == "gguf" and quantised:
        notes.append(f"weights dequantised from {', '.join(quantised)} to float32")
    if checkpoint.artifact_dir is not None:
        notes.append(
            "this is the base model; thresholds of thinfer calibrate are not carried over: calibrate the result"
        )
    return checkpoint, save_dtype, getattr(torch, dtype), tuple(notes)


def _config(checkpoint: Checkpoint) -> Any:
    """The configuration of a checkpoint for transformers, without a word on how its weights are stored."""
    from transformers import AutoConfig

    if checkpoint.kind == "gguf" and _is_known(checkpoint):
        from thinfer.pruning.gguf_model import config_only

        return config_only(checkpoint)
    if checkpoint.kind == "gguf":
        folder, name = str(checkpoint.path.parent), checkpoint.path.name
        config = AutoConfig.from_pretrained(folder, gguf_file=name, local_files_only=True)
    else:
        config = AutoConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
    _forget_storage(config)
    return config


def _forget_storage(config: Any) -> None:
    """Take out what a configuration says on compressed weights: in memory, and as saved, they are plain and dense."""
    for name in ("quantization_config", "compression_config", "sparsity_config"):
        if hasattr(config, name):
            delattr(config, name)


def _is_known(checkpoint: Checkpoint) -> bool:
    """Whether thinfer itself turns a GGUF file of this architecture into a model of transformers."""
    return checkpoint.metadata.get("general.architecture") in ("llama", "qwen2", "qwen3")


def _load_folder(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    import torch

    quantised = checkpoint.metadata.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise UnsupportedError(
            f"{checkpoint.path}: weights quantised by {method!r} cannot be pruned; use the float model it was made from"
        )
    if not isinstance(checkpoint, CompressedCheckpoint):
        return _from_pretrained(checkpoint, str(checkpoint.path), dtype=dtype, local_files_only=True)
    # A sparse format of old that transformers no longer reads; the checkpoint opens it as dense tensors.
    with _loading(checkpoint.path):
        config = _config(checkpoint)
    weights = {name: torch.from_numpy(checkpoint.decode(name)) for name in checkpoint.tensors}
    return _from_pretrained(checkpoint, None, config=config, state_dict=weights, dtype=dtype)


def _load_gguf(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    if _is_known(checkpoint):
        from thinfer.pruning.gguf_model import config_and_weights

        config, weights = config_and_weights(checkpoint)
        return _from_pretrained(checkpoint, None, config=config, state_dict=weights, dtype=dtype)
    folder, name = str(checkpoint.path.parent), checkpoint.path.name
    model = _from_pretrained(checkpoint, folder, gguf_file=name, dtype=dtype, local_files_only=True)
    _forget_storage(model.config)
    return model


def _from_pretrained(checkpoint: Checkpoint, path: str | None, **options: Any) -> PreTrainedModel:
    """The model, with every weight it needs: transformers would make up those that are missing."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    where = checkpoint.path
    make: Any = transformers.AutoModelForCausalLM
    if path is None:  # weights in hand need the class itself
        make = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[options["config"].model_type])
    with _loading(where):
        model, told = make.from_pretrained(path, output_loading_info=True, **options)
    missing = sorted(told["missing_keys"])
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CheckpointError(f"{where}: {len(missing)} tensors are missing: {shown}; fetch the model again")
    loaded: PreTrainedModel = model
    return loaded


def _fill(
    folder: Path,
    model: PreTrainedModel,
    source: Checkpoint | None,
    files: Mapping[str, str | bytes],
    dtype: str | None,
) -> None:
    with _quiet_transformers(), _stored_as(model, dtype):
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

    _forget_storage(model.config)
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


def _frame(backend: Any, bos_id: int | None, eos_id: int | None) -> Any:
    """A post-processor that puts BOS and EOS around a text."""
    from tokenizers.processors import TemplateProcessing

    ends = {place: (backend.id_to_token(i), i) for place, i in (("bos", bos_id), ("eos", eos_id)) if i is not None}
    if not ends:
        return None

    def frame(body: str, kind: int) -> str:
        before = f"{ends['bos'][0]}:{kind} " if "bos" in ends else ""
        after = f" {ends['eos'][0]}:{kind}" if "eos" in ends else ""
        return f"{before}{body}:{kind}{after}"

    return TemplateProcessing(
        single=frame("$A", 0),
        pair=f"{frame('$A', 0)} {frame('$B', 1)}",
        special_tokens=list(dict.fromkeys(ends.values())),
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _loading(where: Path) -> Iterator[None]:
    """What transformers raises while it loads, as our errors."""
    try:
        yield
    except ThinferError:
        raise
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedError(
            f"{where}: transformers cannot load it as a decoder ({_one_line(error)}); code that "
            "comes with a model is never run"
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # What a broken configuration or file makes of transformers' own code has no common class.
        raise CheckpointError(
            f"{where}: transformers cannot load it ({_one_line(error)}); fetch the model again"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without transformers' bars and hints; what matters is an exception or a note."""
    import transformers.utils

    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
