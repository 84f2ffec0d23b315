"""GGUF files for the tests: whole ones written by the gguf package, and broken ones written byte by byte."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

PLAIN = ("F32", "F16", "BF16")
TYPES = (*PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
K_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def stored_bytes(values: np.ndarray, type_name: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes of one type; the package cannot quantise to K types, so those are random blocks with finite scales."""
    kind = GGMLQuantizationType[type_name]
    if type_name not in K_BYTES:
        return quantize(values, kind)
    size = K_BYTES[type_name]
    blocks = rng.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
    halves = rng.uniform(0.01, 1.0, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if type_name == "Q6_K":
        blocks[:, -2:] = halves[:, :2]
    else:
        blocks[:, :4] = halves
    return blocks.reshape(*values.shape[:-1], -1)


def write_all_types(path: Path, **keys: Any) -> dict[str, np.ndarray]:
    """A file with one tensor of every type, one vector and one tensor of three axes; returns the stored bytes."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "ß🙂", "\n", "zero\0byte"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0, 0.0, 1.0])
    writer.add_uint32("llama.block_count", 3)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for key, value in keys.items():
        writer.add_uint32(key.replace("__", "."), value)
    stored = {}
    for type_name in TYPES:
        data = stored_bytes(rng.standard_normal((3, 512)).astype(np.float32), type_name, rng)
        stored[type_name] = data
        writer.add_tensor(type_name, data, raw_dtype=GGMLQuantizationType[type_name])
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("cube", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def tensor(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    """A row of the tensor table; the shape is in NumPy order."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type_id, offset)


def gguf(
    *parts: bytes, keys: int = 0, tensors: int = 0, version: int = 3, data: bytes = b"", magic: bytes = b"GGUF"
) -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)
    return head + bytes(-len(head) % 32) + data if data else head
