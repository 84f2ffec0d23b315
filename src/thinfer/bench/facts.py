"""The facts that ``thinfer info`` shows: this machine, and a model as it would run here."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

import numpy as np

import thinfer
from thinfer import kernels
from thinfer.bench.machine import commit, cpu
from thinfer.engine.cores import usable_cores
from thinfer.errors import UsageError

_READ_BYTES = 1 << 28


def machine_facts(threads: int | None, isa: str | None = None) -> dict[str, Any]:
    """Version, processor, instruction sets (best first one that is used), threads, and measured read bandwidth."""
    count = threads or usable_cores()
    native = find_spec("thinfer._core") is not None
    core = import_module("thinfer._core") if native else None
    isas = list(core.isas()) if core is not None else []
    if core is None:
        used = "none: the native part is not built; `make setup` builds it"
    elif isa and isa not in isas:
        raise UsageError(f"instruction set {isa!r} is unknown or not available here; choose one of: {', '.join(isas)}")
    else:
        used = isa or core.default_isa()
    return {
        "thinfer": f"{thinfer.__version__} ({commit()})",
        "cpu": cpu(),
        "threads": count,
        "isa": used,
        "isas": isas,
        "read_gb_s": round(read_bandwidth(count) / 1e9, 1),
        "kernels": sorted(module.name for module in iter_modules(kernels.__path__) if module.name != "case"),
    }


def read_bandwidth(threads: int, *, rounds: int = 5) -> float:
    """Bytes a second that ``threads`` threads read together from memory: the best of some rounds of NumPy's sum."""
    parts = np.ones((threads, _READ_BYTES // threads // 8), np.int64)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            begin = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, parts.nbytes / (time.perf_counter() - begin))
    return best


def model_facts(reference: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a model, what starts up with it, and the types of its tensors."""
    from thinfer import LLM

    with LLM(reference, **options) as llm:
        config, checkpoint = llm.config, llm.engine.model.checkpoint
        return {
            "model": reference,
            "path": str(checkpoint.path),
            "type": config.model_type,
            "size_bytes": checkpoint.size_bytes,
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "intermediate": config.intermediate_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "vocab": config.vocab_size,
            "context": config.max_position_embeddings,
            "plan": llm.describe(),
            "tensors": [
                {"tensor": info.name, "shape": "x".join(map(str, info.shape)), "type": info.type, "bytes": info.nbytes}
                for info in checkpoint.tensors.values()
            ],
            "packed": packed_facts(llm.engine.executor),
        }


def packed_facts(executor: object) -> list[dict[str, Any]]:
    """Each matrix as it lies in memory: its input site, weights, stored type, codec, layout, bytes, and why."""
    return [
        {
            "site": packed.site,
            "weights": ", ".join(name.removesuffix(".weight").rsplit(".", 1)[-1] for name in packed.plan.weights),
            "type": packed.plan.type,
            "codec": packed.codec,
            "layout": packed.layout,
            "bytes": packed.nbytes,
            "why": packed.plan.why,
        }
        for packed in getattr(executor, "linears", [])
    ]
