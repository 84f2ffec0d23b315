"""A Hugging Face folder as a GGUF file that thinfer, llama.cpp and transformers load."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer.core.config import ModelConfig
from thinfer.errors import ResourceError, UnsupportedError, UsageError
from thinfer.export.encode import TYPES, Encoded, encode_rows, row_bytes
from thinfer.export.gguf_keys import (
    ROPE_FACTORS,
    architecture_keys,
    architecture_name,
    reader_notes,
    require_uniform,
    rope_factors,
)
from thinfer.export.gguf_vocab import compare, tokenizer_keys
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.formats.floats import FLOATS, widen
from thinfer.formats.gguf import GgufCheckpoint
from thinfer.formats.tensor import BLOCKS
from thinfer.models.blocks import EMBEDDING, HEAD, WeightSpec
from thinfer.models.loader import Model, WeightSource, load_model
from thinfer.models.registry import find_architecture
from thinfer.text.tokenizer import Tokenizer

# llama.cpp's numbers of the whole file's type
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_0": 2}
# Four bits at the head cost more quality than they save bytes.
_HEAD_TYPES = {"q4_0": "q8_0"}
_QUANTISATION_VERSION = 2


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One exported tensor: its names, type and shape, its zeros, and what the type did to them (see `Encoded`)."""

    name: str
    gguf_name: str
    type: str
    shape: tuple[int, ...]
    zeros: int
    zeros_lost: int
    zeros_new: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written.

    Attributes:
        file: The GGUF file.
        type: The type asked for.
        architecture: GGUF's name of it.
        bytes: Size of the file.
        sparsity: Zeros among the values of the matrices before.
        zeros_lost: Zeros that a type could not hold.
        zeros_new: Values that a type rounded to zero.
        notes: What a reader of the file should know.
        tensors: All of them, in file order.
    """

    file: str
    type: str
    architecture: str
    bytes: int
    sparsity: float
    zeros_lost: int
    zeros_new: int
    notes: tuple[str, ...]
    tensors: tuple[TensorReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)


def export_gguf(
    model: str | Path, out: Path, kind: str = "f16", *, progress: Callable[[str], None] = lambda _: None
) -> ExportReport:
    """Write a Hugging Face folder as one GGUF file, with its tokenizer and chat template.

    Vectors stay float32; matrices get the type asked for, except that q4_0 stores the head as q8_0 and rows that are no
    multiple of 32 are stored as f16. The file is read back and compared before it gets its name. Holds one tensor at a
    time.

    Args:
        model: A Hugging Face folder or hub id of a llama, qwen2 or qwen3 with one width for all layers. A llama
            with another activation than SiLU becomes a `thinfer-llama`, which only thinfer reads.
        out: The file to write, named .gguf; replaced if it exists.
        kind: One of `TYPES`.
        progress: Told which tensor is written.

    Raises:
        UsageError: Not a .gguf name, an unknown type, or ``out`` is a folder or has no folder to lie in.
        UnsupportedError: Something that GGUF or its readers cannot express.
        CheckpointError: The model is broken.
        ResourceError: The disk is full.

    Example:
        >>> export_gguf("pruned", Path("pruned.gguf"), "q8_0").zeros_lost  # doctest: +SKIP
        0
    """
    _check_arguments(out, kind)
    checkpoint = open_checkpoint(model)
    try:
        if checkpoint.kind != "hf":
            raise UnsupportedError(f"{checkpoint.path} is a GGUF file; export reads Hugging Face folders")
        require_uniform(checkpoint)
        loaded = load_model(checkpoint)
        arch = architecture_name(loaded.config, find_architecture(checkpoint).GGUF_ARCHS)
        with _appears_whole(out) as part:
            tensors = _write(loaded, arch, part, kind, progress)
            progress("reading it back")
            spaces = _read_back(loaded, part)
            size = part.stat().st_size
        notes = [*reader_notes(loaded.config, arch, checkpoint.metadata), *spaces, *_notes(loaded, tensors, kind)]
    finally:
        checkpoint.close()
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    return ExportReport(
        file=str(out),
        type=kind,
        architecture=arch,
        bytes=size,
        sparsity=sum(t.zeros for t in matrices) / max(1, sum(math.prod(t.shape) for t in matrices)),
        zeros_lost=sum(t.zeros_lost for t in tensors),
        zeros_new=sum(t.zeros_new for t in tensors),
        notes=tuple(notes),
        tensors=tuple(tensors),
    )


def _check_arguments(out: Path, kind: str) -> None:
    if kind not in TYPES:
        raise UsageError(f"type {kind!r} is unknown; choose one of {', '.join(TYPES)}")
    if out.suffix != ".gguf" or out.is_dir():
        raise UsageError(f"{out}: name the file to write, ending in .gguf")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}; make it first")


@contextmanager
def _appears_whole(out: Path) -> Iterator[Path]:
    """A temporary name beside the file, which gets the file's name in the end or is removed."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, out)
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise ResourceError(
            f"{out}: cannot be written ({reason}); free some space or choose another -o, and run again"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _write(model: Model, arch: str, path: Path, kind: str, progress: Callable[[str], None]) -> list[TensorReport]:
    from gguf import GGMLQuantizationType, GGUFWriter

    checkpoint, config = model.checkpoint, model.config
    architecture = find_architecture(checkpoint)
    specs = list(architecture.weights(config))
    factors = rope_factors(config, arch, checkpoint.metadata)
    writer = GGUFWriter(path, arch)
    try:
        _add_keys(writer, {"general.type": "model", "general.file_type": _FILE_TYPES[kind]})
        if "mistral" not in checkpoint.path.name.lower():
            # transformers takes a llama file with that word in its name for another architecture.
            _add_keys(writer, {"general.name": checkpoint.path.absolute().name})
        if kind not in ("f32", "f16"):
            _add_keys(writer, {"general.quantization_version": _QUANTISATION_VERSION})
        keys = architecture_keys(config, arch, checkpoint.metadata)
        _add_keys(writer, {f"{arch}.{name}": value for name, value in keys.items()})
        _add_keys(writer, tokenizer_keys(checkpoint, config.vocab_size))
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        types = {spec.name: _type_of(spec, kind, config) for spec in specs}
        for spec in specs:
            rows, columns = _matrix(spec)
            size = rows * row_bytes(columns, types[spec.name])
            raw = GGMLQuantizationType[types[spec.name]]
            # A float dtype, so that the package takes the shape for values and not for bytes.
            writer.add_tensor_info(spec.gguf_name, spec.shape, np.dtype(np.float32), size, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        reports = []
        for number, spec in enumerate(specs, 1):
            progress(f"{spec.name} ({number} of {len(specs)})")
            source = model.weights.source(spec.name)
            encoded = _encode(source, spec, types[spec.name], architecture.INTERLEAVED_GGUF)
            source.release()
            writer.write_tensor_data(encoded.data)
            kinds = (types[spec.name], spec.shape, encoded.zeros, encoded.zeros_lost, encoded.zeros_new)
            reports.append(TensorReport(spec.name, spec.gguf_name, *kinds))
    finally:
        writer.close()
    return reports


def _add_keys(writer: Any, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _type_of(spec: WeightSpec, kind: str, config: ModelConfig) -> str:
    """The block type of a weight."""
    if len(spec.shape) == 1:
        return "F32"
    head = spec.name == HEAD or (spec.name == EMBEDDING and config.tie_word_embeddings)
    chosen = (_HEAD_TYPES.get(kind, kind) if head else kind).upper()
    return chosen if spec.shape[1] % BLOCKS[chosen][0] == 0 else "F16"


def _matrix(spec: WeightSpec) -> tuple[int, int]:
    return (1, spec.shape[0]) if len(spec.shape) == 1 else (spec.shape[0], spec.shape[1])


def _encode(source: WeightSource, spec: WeightSpec, kind: str, interleaved: bool) -> Encoded:
    rows, columns = _matrix(spec)
    order = np.arange(spec.shape[0])
    if interleaved and spec.rotary_heads:
        # File row (head, j, half) is row (head, half, j) of the model.
        order = order.reshape(spec.rotary_heads, 2, -1).swapaxes(1, 2).reshape(-1)
    if len(spec.shape) == 1:
        vector = source.float32()[order][None]
        return encode_rows(lambda first, last: vector[first:last], (rows, columns), kind, spec.name)
    if source.type not in FLOATS:
        raise UnsupportedError(f"{spec.name} has type {source.type}; export reads float weights")
    raw = source.raw

    def decode(first: int, last: int) -> NDArray[np.float32]:
        return widen(np.ascontiguousarray(raw[order[first:last]]), source.type)

    return encode_rows(decode, (rows, columns), kind, spec.name)


def _read_back(model: Model, path: Path) -> list[str]:
    """Open what was written and compare all but the values, which were compared when they were encoded; give notes."""
    written = GgufCheckpoint(path)
    try:
        found = load_model(written)
        _require_same_config(model, found)
        checkpoint = model.checkpoint
        original, reread = Tokenizer.from_checkpoint(checkpoint), Tokenizer.from_checkpoint(written)
        return compare(original, reread, str(checkpoint.path))
    finally:
        written.close()


def _require_same_config(model: Model, written: Model) -> None:
    names = [
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "vocab_size", "max_position_embeddings", "layer_windows", "tie_word_embeddings",
        "attention_bias", "output_bias", "mlp_bias", "qk_norm", "norm_act",
    ]  # fmt: skip
    differ = [name for name in names if getattr(model.config, name) != getattr(written.config, name)]
    ours, theirs = model.config.rope, written.config.rope
    expected, found = (np.array([*rope.inv_freq, rope.attention_factor]) for rope in (ours, theirs))
    if not np.allclose(expected, found, rtol=1e-5, atol=0):
        differ.append("rope")
    if not math.isclose(model.config.act_threshold, written.config.act_threshold, rel_tol=1e-6):
        differ.append("act_threshold")
    if differ:
        raise UnsupportedError(
            f"{model.checkpoint.path}: GGUF cannot express this configuration: {', '.join(differ)} would be read back"
            " as something else"
        )


def _notes(model: Model, tensors: list[TensorReport], kind: str) -> list[str]:
    notes = []
    narrow = [t for t in tensors if len(t.shape) == 2 and t.type == "F16"] if kind not in ("f32", "f16") else []
    if narrow:
        notes.append(f"{len(narrow)} matrices have rows that are no multiple of 32 values, so they are stored as f16")
    if lost := sum(t.zeros_lost for t in tensors):
        notes.append(f"{lost} zeros became other values in type {kind}")
    if new := sum(t.zeros_new for t in tensors):
        notes.append(f"{new} values became zero in type {kind}")
    if model.ignored:
        shown = ", ".join(model.ignored[:4]) + (" and others" if len(model.ignored) > 4 else "")
        notes.append(f"{len(model.ignored)} tensors that the architecture does not use are left out: {shown}")
    if model.checkpoint.artifact_dir is not None:
        notes.append("the thresholds of `thinfer calibrate` are left out; calibrate the file to skip channels")
    return notes
