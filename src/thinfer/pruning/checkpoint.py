"""A stored model as a transformers model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinfer.errors import CheckpointError, ThinferError, UnsupportedError, UsageError
from thinfer.formats.checkpoint import Checkpoint, open_checkpoint
from thinfer.formats.compressed_tensors import CompressedCheckpoint
from thinfer.models.gguf_config import SPARSE_LLAMA
from thinfer.pruning.known import require_known
from thinfer.pruning.transformers_setup import forget_storage, quiet_transformers
from thinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16")

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


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
        UnsupportedError: not a decoder that transformers knows, though thinfer may run it, or weights
            quantised in a way it cannot undo.

    Example:
        >>> load_torch("model.gguf").model.num_parameters()  # doctest: +SKIP
        134515008
    """
    checkpoint, save_dtype, memory_dtype, notes = _open(ref, dtype, device)
    load = _load_gguf if checkpoint.kind == "gguf" else _load_folder
    with quiet_transformers():
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
    with quiet_transformers(), _loading(checkpoint.path), torch.device("meta"):
        make: Any = AutoModelForCausalLM
        model = make.from_config(_config(checkpoint), dtype=memory_dtype)
    return LoadedModel(model, checkpoint, str(ref), save_dtype, notes)


def _open(ref: str | Path, dtype: str, device: str) -> tuple[Checkpoint, str, torch.dtype, tuple[str, ...]]:
    """The checkpoint, the precision to save in, the precision in memory, and what the user should know."""
    require_torch()
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    import torch

    checkpoint = open_checkpoint(ref)
    require_known(checkpoint)
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
    forget_storage(config)
    return config


def _is_known(checkpoint: Checkpoint) -> bool:
    """Whether thinfer itself turns a GGUF file of this architecture into a model of transformers."""
    return checkpoint.metadata.get("general.architecture") in ("llama", "qwen2", "qwen3", SPARSE_LLAMA)


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
    forget_storage(model.config)
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
