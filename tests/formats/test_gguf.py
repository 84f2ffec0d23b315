import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from formats.gguf_files import PLAIN, TYPES, gguf, tensor, text, write_all_types
from thinfer.errors import CheckpointError, ThinferError, UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path / "model.gguf"
    return path, write_all_types(path)


def test_lists_and_decodes_every_type(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, stored = model
    checkpoint = open_checkpoint(path)
    assert (checkpoint.kind, checkpoint.path, checkpoint.artifact_dir) == ("gguf", path, None)
    assert checkpoint.size_bytes == path.stat().st_size
    assert list(checkpoint.tensors) == [*TYPES, "vector", "cube"]
    for name in TYPES:
        info = checkpoint.tensors[name]
        assert (info.shape, info.type, info.nbytes) == ((3, 512), name, stored[name].nbytes)
        raw = checkpoint.raw(name)
        assert raw.shape == (3, info.row_bytes)
        assert not raw.flags.writeable
        np.testing.assert_array_equal(raw, stored[name].view(np.uint8).reshape(3, -1))
        expected = dequantize(stored[name], GGMLQuantizationType[name])
        np.testing.assert_array_equal(checkpoint.decode(name), expected)
        if name in PLAIN:
            assert checkpoint.decode(name).flags.writeable
    assert checkpoint.raw("vector").shape == (1, 20)
    np.testing.assert_array_equal(checkpoint.decode("vector"), np.arange(5))
    assert checkpoint.raw("cube").shape == (6, 16)
    np.testing.assert_array_equal(checkpoint.decode("cube"), np.arange(24).reshape(2, 3, 4))


def test_metadata(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    metadata = open_checkpoint(model[0]).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 3
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    tokens = metadata["tokenizer.ggml.tokens"]
    assert list(tokens) == ["a", "", "ß🙂", "\n", "zero\0byte"]
    assert (tokens[2], tokens[-2], tokens[1:3], len(tokens)) == ("ß🙂", "\n", ["", "ß🙂"], 5)
    np.testing.assert_array_equal(metadata["tokenizer.ggml.scores"], [0.5, -1, 2, 0, 1])


def test_version_2_and_alignment(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_all_types(path)
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    assert open_checkpoint(path).decode("vector").tolist() == [0, 1, 2, 3, 4]

    key = text("general.alignment") + struct.pack("<II", 4, 64)
    head = gguf(key, tensor("w", (2,), 0, 64), keys=1, tensors=1)
    path.write_bytes(head + bytes(-len(head) % 64) + bytes(64) + struct.pack("<2f", 1, 2))
    assert open_checkpoint(path).decode("w").tolist() == [1, 2]


def test_release_keeps_values_and_close_keeps_views(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    checkpoint = open_checkpoint(model[0])
    raw = checkpoint.raw("Q6_K")
    before = raw.copy()
    for name in checkpoint.tensors:
        checkpoint.release(name)
    np.testing.assert_array_equal(raw, before)
    checkpoint.close()
    np.testing.assert_array_equal(raw, before)


def test_fingerprint_follows_header_weights_and_size(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_all_types(path)
    first = open_checkpoint(path).fingerprint()
    assert len(first) == 64
    assert first == open_checkpoint(path).fingerprint()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert open_checkpoint(path).fingerprint() != first
    write_all_types(path, llama__context_length=7)
    assert open_checkpoint(path).fingerprint() != first


def test_fingerprint_notices_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_all_types(path)
    checkpoint = open_checkpoint(path)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes() + b"x")
    other.replace(path)
    with pytest.raises(CheckpointError, match="replaced while it was open"):
        checkpoint.fingerprint()


def test_missing_tensor_is_named(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor blk\.0\.nothing"):
        open_checkpoint(model[0]).raw("blk.0.nothing")


def test_unsupported_types_open_and_are_named_on_access(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    table = (tensor("good", (4,), 0, 0), tensor("bad.weight", (256,), 23, 32), tensor("odd", (1,), 999, 192))
    path.write_bytes(gguf(*table, tensors=3, data=bytes(256)))
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["bad.weight"].type == "IQ4_XS"
    assert checkpoint.decode("good").tolist() == [0, 0, 0, 0]
    for name, type_name in (("bad.weight", "IQ4_XS"), ("odd", "number 999")):
        for use in (checkpoint.raw, checkpoint.decode):
            with pytest.raises(UnsupportedError, match=f"{name} has type {type_name}.*2 of 3 tensors.*Q4_K"):
                use(name)


HUGE = 1 << 62
STRING_ARRAY = text("k") + struct.pack("<IIQ", 9, 8, HUGE)
BROKEN = {
    "empty": (b"", "empty"),
    "one byte": (b"G", "needs 4 bytes"),
    "magic": (gguf(magic=b"GGML") + bytes(64), "not a GGUF file"),
    "truncated counts": (b"GGUF" + struct.pack("<IQ", 3, 0), "key count needs"),
    "tensor count": (gguf(tensors=HUGE), "more than the file can hold"),
    "key count": (gguf(keys=HUGE), "more than the file can hold"),
    "key name length": (gguf(struct.pack("<Q", HUGE) + bytes(32), keys=1), "key name is 4611686018427387904 bytes"),
    "key name not UTF-8": (gguf(text(b"\xff\xfe") + bytes(32), keys=1), "not UTF-8"),
    "key twice": (gguf((text("k") + struct.pack("<II", 4, 1)) * 2, keys=2), "key k is given twice"),
    "value type": (gguf(text("k") + struct.pack("<IQ", 77, 0), keys=1), "unknown value type 77"),
    "string length": (gguf(text("k") + struct.pack("<IQ", 8, HUGE) + b"abc", keys=1), "k needs"),
    "array count": (gguf(text("k") + struct.pack("<IIQ", 9, 4, HUGE) + b"abc", keys=1), "k with 46116860"),
    "array type": (gguf(text("k") + struct.pack("<IIQ", 9, 55, 1) + b"abcd", keys=1), "unknown value type 55"),
    "string array count": (gguf(STRING_ARRAY + bytes(64), keys=1), "claims 46116860"),
    "string array item": (
        gguf(text("k") + struct.pack("<IIQQ", 9, 8, 2, HUGE) + bytes(64), keys=1),
        "string 1 of k lies past",
    ),
    "last string": (gguf(text("k") + struct.pack("<IIQQ", 9, 8, 1, 99) + bytes(8), keys=1), "last string of k"),
    "nested arrays": (gguf(text("k") + struct.pack("<IIQ", 9, 9, HUGE) + bytes(64), keys=1), "nested arrays"),
    "deep arrays": (gguf(text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50, keys=1), "nested arrays"),
    "alignment zero": (gguf(text("general.alignment") + struct.pack("<II", 4, 0), keys=1), "power of two"),
    "alignment odd": (gguf(text("general.alignment") + struct.pack("<II", 4, 48), keys=1), "power of two"),
    "alignment type": (gguf(text("general.alignment") + struct.pack("<IQ", 8, 0), keys=1), "power of two"),
    "axes": (gguf(tensor("w", (1,) * 9, 0, 0), tensors=1, data=bytes(64)), "tensor w claims 9 axes"),
    "no axes": (gguf(tensor("w", (), 0, 0), tensors=1, data=bytes(64)), "tensor w claims 0 axes"),
    "empty axis": (gguf(tensor("w", (0, 4), 0, 0), tensors=1, data=bytes(64)), "empty axis"),
    "huge shape": (gguf(tensor("w", (HUGE, HUGE), 0, 0), tensors=1, data=bytes(64)), r"w \(F32\) ends at byte"),
    "offset": (gguf(tensor("w", (4,), 0, HUGE), tensors=1, data=bytes(64)), r"w \(F32\) ends at byte"),
    "truncated data": (gguf(tensor("w", (32,), 8, 0), tensors=1, data=bytes(33)), r"w \(Q8_0\) ends at .*truncated"),
    "offset not aligned": (gguf(tensor("w", (4,), 0, 4), tensors=1, data=bytes(64)), "multiple of the alignment 32"),
    "row size": (gguf(tensor("w", (2, 48), 2, 0), tensors=1, data=bytes(64)), "not a multiple of the 32 of a Q4_0"),
    "tensor twice": (gguf(*[tensor("w", (4,), 0, 0)] * 2, tensors=2, data=bytes(64)), "w is listed twice"),
    "overlap": (
        gguf(tensor("a", (16,), 0, 0), tensor("b", (16,), 0, 32), tensors=2, data=bytes(128)),
        "tensors a and b overlap",
    ),
    "table cut": (gguf(tensor("w", (4,), 0, 0)[:-3], tensors=1), "more than the file can hold"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_give_one_clear_error(tmp_path: Path, name: str) -> None:
    data, message = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf(version=1), "version 1"),
        (gguf(version=9), "version 9"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf(text("split.count") + struct.pack("<IH", 2, 4), keys=1), "4 parts"),
    ],
)
def test_unsupported_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(path)


def test_a_token_that_is_not_utf8_is_named_on_access(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    array = struct.pack("<IIQ", 9, 8, 2) + text("ok") + text(b"\xff")
    path.write_bytes(gguf(text("tokens") + array, keys=1))
    tokens = open_checkpoint(path).metadata["tokens"]
    assert tokens[0] == "ok"
    for use in (lambda: tokens[1], lambda: list(tokens)):
        with pytest.raises(CheckpointError, match="string 1 of tokens is not UTF-8"):
            use()


def test_every_truncation_fails_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_all_types(path)
    data = path.read_bytes()
    for length in [*range(0, 1200, 7), *range(1200, len(data), 997)]:
        path.write_bytes(data[:length])
        with pytest.raises(ThinferError):
            open_checkpoint(path)
