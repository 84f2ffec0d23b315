"""Corrupted GGUF files: whatever happens to the bytes, only a ThinferError may come out, with bounded memory."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from formats.gguf_files import write_all_types
from formats.mutations import Mutation, mutations
from thinfer.errors import ThinferError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.text.gguf_tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    write_all_types(path)
    return path.with_name("broken.gguf"), path.read_bytes()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutation=mutations(hot=1100))
def test_only_our_errors_escape(whole: tuple[Path, bytes], mutation: Mutation) -> None:
    path, data = whole
    path.write_bytes(mutation(data))
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.fingerprint()
        for name, info in checkpoint.tensors.items():
            try:
                assert checkpoint.raw(name).nbytes == info.nbytes
                assert checkpoint.decode(name).shape == info.shape
            except ThinferError:
                continue
        for value in checkpoint.metadata.values():
            if not isinstance(value, (str, int, float)):
                list(value)
        build_tokenizer(checkpoint.metadata, str(path))
    except ThinferError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 << 20
