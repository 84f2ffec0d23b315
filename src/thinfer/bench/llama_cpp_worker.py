"""The other end of a `Worker` for llama.cpp: run by a Python that has llama-cpp-python and need not have thinfer.

Uses llama.cpp's own C interface, as its llama-bench does: one batch for a prompt (logical and physical batches of
512), one token a step for decode, keys and values in the same type as ours, no tokenisation, no sampling.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 512


class LlamaCpp:
    """One model and context of llama.cpp."""

    def __init__(self, lib: Any, request: dict[str, Any]) -> None:
        self.lib = lib
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(request["model"].encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {request['model']}")
        context_params = lib.llama_context_default_params()
        context_params.n_ctx = -(-request["max_model_len"] // 256) * 256
        context_params.n_batch = BATCH
        context_params.n_ubatch = BATCH
        context_params.n_threads = request["threads"]
        context_params.n_threads_batch = request["threads"]
        kv_type = {"f16": lib.GGML_TYPE_F16, "f32": lib.GGML_TYPE_F32}[request["kv_type"]]
        context_params.type_k = kv_type
        context_params.type_v = kv_type
        self.context = lib.llama_init_from_model(self.model, context_params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.length = 0

    def facts(self) -> dict[str, Any]:
        """What the model and the package say about themselves."""
        import llama_cpp

        return {
            "backend": "llama.cpp",
            "size_bytes": int(self.lib.llama_model_size(self.model)),
            "n_params": int(self.lib.llama_model_n_params(self.model)),
            "commit": f"llama-cpp-python {llama_cpp.__version__}",
        }

    def clear(self) -> None:
        """Empty the context."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.length = 0

    def step(self, tokens: list[int]) -> None:
        """Append tokens; logits of the last one, waited for."""
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            batch = self.batch
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = self.length + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = first + i == len(tokens) - 1
            code = self.lib.llama_decode(self.context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            self.length += len(part)
        self.lib.llama_synchronize(self.context)

    def prefill(self, tokens: list[int]) -> float:
        """Seconds of one prompt in an empty context."""
        self.clear()
        begin = time.perf_counter()
        self.step(tokens)
        return time.perf_counter() - begin

    def decode(self, start: list[int], tokens: list[int]) -> float:
        """Seconds of one step a token after an untimed prompt."""
        self.clear()
        self.step(start)
        begin = time.perf_counter()
        for token in tokens:
            self.step([token])
        return time.perf_counter() - begin


def peak_rss_bytes() -> int:
    """VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def answer(engine: Any, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One reply to one request; returns the engine, which `load` makes, and the reply."""
    do = request["do"]
    if do == "load":
        try:
            import llama_cpp.llama_cpp as lib
        except ImportError as error:
            raise RuntimeError(f"{sys.executable} has no llama-cpp-python ({error}); pip install it there") from error
        engine = LlamaCpp(lib, request)
        return engine, engine.facts()
    if do == "rss":
        return engine, {"rss_bytes": peak_rss_bytes()}
    seconds = (
        engine.prefill(request["tokens"]) if do == "prefill" else engine.decode(request["start"], request["tokens"])
    )
    return engine, {"seconds": seconds, "density": 1.0, "bytes_per_token": None}


def main() -> None:
    """Answer until stdin ends."""
    # The native part prints on stdout too; the answers get a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = None
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            try:
                engine, reply = answer(engine, json.loads(line))
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
