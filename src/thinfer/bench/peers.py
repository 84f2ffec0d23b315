"""Other engines, run for comparison on the same file, tokens, threads and type of keys and values."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinfer.bench import llama_cpp_worker
from thinfer.bench.throughput import Contender, Test
from thinfer.bench.worker import Worker
from thinfer.errors import PeerError, UsageError

PEERS = ("llama.cpp",)


def open_peers(
    name: str, python: str | None, ours: Sequence[Contender], options: Mapping[str, Any], tests: Sequence[Test]
) -> list[Contender]:
    """One peer for every distinct file of our contenders.

    Args:
        name: which engine; only ``llama.cpp``.
        python: a Python that has llama-cpp-python; None: THINFER_PEER_PYTHON, else the one that runs us.
        ours: our contenders; the peer gets the base file, token ids and number of threads of the first of a file.
        options: as for `open_contender`; ``kv_type`` is passed on.
        tests: what will be run.

    Raises:
        UsageError: an unknown engine, or a checkpoint that is not GGUF.
        PeerError: the Python, the package or the model does not work there.
    """
    if name not in PEERS:
        raise UsageError(f"--against {name}: unknown; known: {', '.join(PEERS)}")
    python = python or os.environ.get("THINFER_PEER_PYTHON") or sys.executable
    firsts: dict[str, Contender] = {}
    for contender in ours:
        firsts.setdefault(contender.facts["path"], contender)
    peers: list[Contender] = []
    try:
        for path, contender in firsts.items():
            peers.append(_open(name, python, path, contender, options, tests))
    except BaseException:
        for peer in peers:
            peer.worker.close()
        raise
    return peers


def _open(
    name: str, python: str, path: str, twin: Contender, options: Mapping[str, Any], tests: Sequence[Test]
) -> Contender:
    if Path(path).suffix != ".gguf":
        raise UsageError(f"{name} reads GGUF files only; {path} is none")
    worker = Worker([python, str(Path(llama_cpp_worker.__file__))], name)
    try:
        loaded = worker.load(
            {
                "model": path,
                "threads": twin.facts["threads"],
                "kv_type": options.get("kv_type", "f16"),
                "max_model_len": max(test.positions for test in tests),
            }
        )
    except PeerError as error:
        worker.close()
        raise PeerError(f"{error}; --peer-python names a Python that has llama-cpp-python") from error
    except BaseException:
        worker.close()
        raise
    facts = {
        **twin.facts,
        "model": path,
        "backend": loaded["backend"],
        "commit": loaded["commit"],
        "n_params": loaded["n_params"],
        "sparsity": 0.0,
    }
    return Contender(worker, facts, twin.tokens, is_peer=True)
