"""Times decode of a ReLU model of the shape of Llama-2-7B whose weights are random, beside llama.cpp.

    python scripts/relu_7b_shape.py -o FOLDER --peer-python PYTHON     # again with the same shape: files are reused

The files are those of random_relu_gguf.py: the same tensors, sparse for us and dense for llama.cpp.

Contenders, each in a process of its own, in interleaved rounds of decode steps after a prompt of 16:

* dense: all neurons, in rows (`--neurons off`);
* exact: gate first, then up and down for what fires (`--neurons skip --layout columns`: what is timed at load otherwise
  is given, so that load by others does not choose);
* given: lists of just those neurons that fire in that step, found by a first pass, as a perfect predictor would give
  them. Handing the lists over is in the time;
* llama.cpp on the dense file.

Before the clock runs, all of ours must give the logits of dense to the bit, and the share of zeros, counted at the
inputs of down in all steps and layers, must be the stated one within 2 points.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from random_relu_gguf import Shape, write_files
from thinfer.bench import engine_worker
from thinfer.bench.machine import commit
from thinfer.bench.peers import open_peers
from thinfer.bench.report import as_json, table
from thinfer.bench.throughput import START_TOKENS, Contender, Test, measure
from thinfer.bench.worker import Worker, peak_rss_bytes, serve
from thinfer.core.active_set import ActiveSet
from thinfer.core.neuron_selector import NeuronSelector
from thinfer.engine.batch import Batch
from thinfer.engine.executor import Float32
from thinfer.engine.options import EngineOptions, NeuronsName
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import ThinferError, UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

KINDS: dict[str, NeuronsName] = {"dense": "off", "exact": "skip", "given": "skip"}
"""Ours, with the engine's option `neurons`; given takes lists besides."""

_TOLERANCE = 0.02


class ShapeWorker(Worker):
    """One of KINDS in its own process."""

    def __init__(self) -> None:
        super().__init__([sys.executable, str(Path(__file__).resolve()), "--worker"], "thinfer")

    def check(self, start: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
        """The `zeros` of these steps' neurons, and the `digest` of their logits."""
        return self._ask({"do": "check", "start": list(start), "tokens": list(tokens)})


class ShapeServer:
    """The other end of a ShapeWorker."""

    def __init__(self) -> None:
        self._engine: Engine
        self._lists: list[dict[int, ActiveSet]] = []
        self._listed = False

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        if request["do"] == "load":
            return self._load(request)
        if request["do"] == "rss":
            return {"rss_bytes": peak_rss_bytes()}
        start, tokens = request["start"], request["tokens"]
        if request["do"] == "check":
            return self._check(start, tokens)
        reply = engine_worker.decode(self._engine, start, tokens, self._give)
        self._take_back()
        return reply

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        self._listed = request["kind"] == "given"
        options = EngineOptions(
            threads=request["threads"],
            neurons=KINDS[request["kind"]],
            layout="auto" if request["kind"] == "dense" else "columns",
            max_model_len=request["tokens"],
        )
        model = load_model(open_checkpoint(request["model"]))
        self._engine = Engine(model, options, neurons=NeuronSelector("given") if self._listed else None)
        notes = self._engine.describe()
        return {"backend": engine_worker.backend(self._engine), "threads": options.thread_count(), "notes": notes}

    def _check(self, start: list[int], tokens: list[int]) -> dict[str, Any]:
        lists: list[dict[int, ActiveSet]] = []

        def observe(_: Batch, site: str, x: Float32) -> None:
            if site.endswith(".down"):
                lists[-1][int(site.split(".")[1])] = ActiveSet.where(x != 0)

        sequence, digest = self._engine.new_sequence(), hashlib.sha256()
        self._engine.step([Work(sequence, start, logits="none")])
        for token in tokens:
            lists.append({})
            (logits,) = self._engine.step([Work(sequence, [token])], observe=observe)
            digest.update(logits.tobytes())
        self._engine.free(sequence)
        zeros = 1 - float(np.mean([active.density for step in lists for active in step.values()]))
        if self._listed:
            self._lists, digest = lists, hashlib.sha256()
            self._engine.step([Work(sequence, start, logits="none")])
            for number, token in enumerate(tokens):
                self._give(number)
                digest.update(self._engine.step([Work(sequence, [token])])[0].tobytes())
            self._engine.free(sequence)
            self._take_back()
        return {"zeros": zeros, "digest": digest.hexdigest()}

    def _give(self, step: int) -> None:
        for layer, active in self._lists[step].items() if self._lists else ():
            self._engine.set_active(layer, active)

    def _take_back(self) -> None:
        """The prompts that follow have many rows, and run with all neurons."""
        for layer in self._lists[0] if self._lists else ():
            self._engine.set_active(layer, None)


def open_ours(kind: str, paths: tuple[Path, Path], threads: int, tokens: Sequence[int]) -> Contender:
    """A contender of KINDS; its facts name the dense file, which a peer is given."""
    worker = ShapeWorker()
    try:
        request = {"model": str(paths[0]), "kind": kind, "threads": threads, "tokens": len(tokens)}
        loaded = worker.load(request)
    except BaseException:
        worker.close()
        raise
    facts = {
        "model": f"thinfer {kind}",
        "path": str(paths[1]),
        "size_bytes": paths[0].stat().st_size,
        "n_params": 0,
        "sparsity": 0.0,
        "backend": loaded["backend"],
        "threads": loaded["threads"],
        "commit": commit(),
    }
    return Contender(worker, facts, tokens, notes=loaded["notes"])


def require_same(contenders: Sequence[Contender], zeros: float) -> float:
    """The share of zeros as it is; ThinferError when it is another than stated, or logits differ from the first's."""
    found = []
    for contender in contenders:
        if isinstance(contender.worker, ShapeWorker):
            start, rest = contender.tokens[:START_TOKENS], contender.tokens[START_TOKENS:]
            found.append(contender.worker.check(start, rest))
            if found[-1]["digest"] != found[0]["digest"]:
                raise ThinferError(f"{contender.facts['model']} does not give the logits of dense; please report this")
    measured = float(found[0]["zeros"])
    if abs(measured - zeros) > _TOLERANCE:
        raise ThinferError(f"{measured:.1%} of the neurons are zero, not {zeros:.1%}: the weights are not as random")
    return measured


def groups(size: int, with_peer: bool) -> list[list[str]]:
    """What is loaded together: all if memory allows, else dense with as many of the others as fit, at least one."""
    others = [*list(KINDS)[1:], *(["peer"] if with_peer else [])]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    many = max(1, int(available / (1.2 * size)) - 1)
    return [["dense", *others[first : first + many]] for first in range(0, len(others), many)]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the files, check, measure; rows as of `thinfer bench`, with `zeros` and `ratio_dense`."""
    if min(options.steps, options.rounds, options.threads) < 1:
        raise UsageError("--steps, --rounds and --threads must be at least 1")
    shape = Shape(
        options.layers,
        options.hidden,
        options.intermediate,
        options.heads,
        options.vocab,
        options.zeros,
        options.seed,
    )
    paths = write_files(shape, options.out)
    test = Test("tg", options.steps)
    tokens = np.random.default_rng(shape.seed).integers(3, shape.vocab, test.positions).tolist()
    rows: list[dict[str, Any]] = []
    for group in groups(paths[0].stat().st_size, bool(options.peer_python)):
        with ExitStack() as workers:
            contenders: list[Contender] = []
            for name in group:
                if name == "peer":
                    contenders += open_peers("llama.cpp", options.peer_python, contenders[:1], {}, [test])
                    contenders[-1].facts = {**contenders[-1].facts, "model": "llama.cpp, SiLU"}
                else:
                    contenders.append(open_ours(name, paths, options.threads, tokens))
                workers.callback(contenders[-1].worker.close)
                say("\n".join([f"loaded {contenders[-1].facts['model']}", *contenders[-1].notes]))
            zeros = require_same(contenders, shape.zeros)
            say(f"zeros: {zeros:.2%}; logits are equal to the bit; measuring")
            made = measure(contenders, [test], options.rounds, progress=say)
            dense = made[0]["t_s_median"]
            rows += [row | {"zeros": zeros, "ratio_dense": row["t_s_median"] / dense} for row in made]
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens a second with their spread, ratios, bytes and peak memory."""
    head = ["engine", "t/s", "of dense", "of llama.cpp", "MB/token", "peak MiB", "zeros"]
    body = [
        [
            row["model"],
            f"{row['t_s_median']:.2f} ± {row['t_s_stddev']:.2f}",
            f"{row['ratio_dense']:.2f}x",
            f"{row['ratio_median']:.2f}x" if "ratio_median" in row else "",
            f"{row['bytes_per_token'] / 1e6:.0f}" if row["bytes_per_token"] else "",
            f"{row['rss_bytes'] / 2**20:.0f}",
            f"{row['zeros']:.2%}",
        ]
        for row in rows
    ]
    return table(head, body)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; sizes are those of Llama-2-7B unless given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the two files, which stay there")
    for name, size in (("layers", 32), ("hidden", 4096), ("intermediate", 11008), ("heads", 32), ("vocab", 32000)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--zeros", type=float, default=0.9, help="share of neurons that do not fire")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", help="a Python that has llama-cpp-python; without it no peer runs")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    return parser.parse_args(arguments)


def say(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print the table."""
    options = parse(arguments)
    try:
        rows = run(options)
    except ThinferError as error:
        say(f"error: {error}")
        return error.exit_code
    if options.json is not None:
        options.json.write_text(as_json(rows) + "\n", encoding="utf-8")
    print(as_table(rows))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(ShapeServer().answer)
    else:
        sys.exit(main())
