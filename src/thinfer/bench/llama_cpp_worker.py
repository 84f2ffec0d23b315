"""The other end of a `Worker` for llama.cpp: run by a Python that has llama-cpp-python and need not have thinfer.

Uses llama.cpp's own C interface, as its llama-bench does: one batch for a prompt (logical and physical batches of
512), one token a step for decode, keys and values in the same type as ours, no tokenisation, no sampling. Several
streams are the sequences of one context, a token of each in every batch, as its batched-bench does.
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
        self.request = request
        self.streams = 1
        self.context = self.new_context(1)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.lengths = [0]

    def new_context(self, streams: int) -> Any:
        """A context of so many sequences, each with its own keys and values."""
        lib, request = self.lib, self.request
        params = lib.llama_context_default_params()
        params.n_ctx = -(-request["max_model_len"] // 256) * 256 * streams
        params.n_batch = BATCH
        params.n_ubatch = BATCH
        params.n_seq_max = streams
        # llama.cpp's own advice for sequences that share no long beginning.
        params.kv_unified = False
        params.n_threads = request["threads"]
        params.n_threads_batch = request["threads"]
        kv_type = {"f16": lib.GGML_TYPE_F16, "f32": lib.GGML_TYPE_F32}[request["kv_type"]]
        params.type_k = kv_type
        params.type_v = kv_type
        context = lib.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        return context

    def facts(self) -> dict[str, Any]:
        """What the model and the package say about themselves."""
        import llama_cpp

        return {
            "backend": "llama.cpp",
            "size_bytes": int(self.lib.llama_model_size(self.model)),
            "n_params": int(self.lib.llama_model_n_params(self.model)),
            "commit": f"llama-cpp-python {llama_cpp.__version__}",
        }

    def clear(self, streams: int = 1) -> None:
        """An empty context of so many sequences."""
        if streams != self.streams:
            self.lib.llama_free(self.context)
            self.context, self.streams = self.new_context(streams), streams
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.lengths = [0] * streams

    def step(self, rows: list[tuple[int, int]], outputs: set[int]) -> None:
        """Append (sequence, token) pairs, at most BATCH; logits of the rows in ``outputs``, waited for."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (sequence, token) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = self.lengths[sequence]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i in outputs
            self.lengths[sequence] += 1
        code = self.lib.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        self.lib.llama_synchronize(self.context)

    def prompt(self, sequence: int, tokens: list[int]) -> None:
        """Append a prompt to a sequence; logits of its last token."""
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            last = {len(part) - 1} if first + BATCH >= len(tokens) else set()
            self.step([(sequence, token) for token in part], last)

    def prefill(self, tokens: list[int]) -> float:
        """Seconds of one prompt in an empty context."""
        self.clear()
        begin = time.perf_counter()
        self.prompt(0, tokens)
        return time.perf_counter() - begin

    def decode(self, start: list[int], tokens: list[int]) -> float:
        """Seconds of one step a token after an untimed prompt."""
        self.clear()
        self.prompt(0, start)
        begin = time.perf_counter()
        for token in tokens:
            self.step([(0, token)], {0})
        return time.perf_counter() - begin

    def streams_together(self, prompts: list[list[int]], answers: list[list[int]], check: bool) -> dict[str, Any]:
        """Seconds of every step that takes the next token of each answer; its prompts are not timed.

        With ``check`` also the fraction of tokens that llama.cpp, too, finds the likeliest; such a round's times are
        those of the check.
        """
        self.clear(len(prompts))
        for sequence, tokens in enumerate(prompts):
            self.prompt(sequence, tokens)
        everyone = set(range(len(prompts)))
        seconds = []
        agreed = 0
        for turn in range(len(answers[0]) - 1):
            begin = time.perf_counter()
            self.step([(sequence, answer[turn]) for sequence, answer in enumerate(answers)], everyone)
            seconds.append(time.perf_counter() - begin)
            if check:
                agreed += sum(self.likeliest(row) == answer[turn + 1] for row, answer in enumerate(answers))
        agreement = agreed / (len(seconds) * len(prompts)) if check else None
        return {"step_seconds": seconds, "agreement": agreement}

    def likeliest(self, row: int) -> int:
        """The token with the largest logit after a row of the last step."""
        import numpy as np

        vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        return int(np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, row), (vocab,)).argmax())


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
    if do == "streams":
        reply = engine.streams_together(request["prompts"], request["answers"], request["check"])
        return engine, reply | {"answers": request["answers"], "density": 1.0, "bytes_per_token": None}
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
