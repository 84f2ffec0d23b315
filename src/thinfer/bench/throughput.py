"""Prefill (``pp512``) and decode (``tg128``) speed of models and peers, in interleaved rounds.

As in llama-bench, a figure holds the model's work alone: no tokenisation, no sampling. ``ppN`` runs N tokens as one
prompt in an empty context and computes the last one's logits; ``tgN`` runs N steps of one token after a prompt of 16.
The tokens are those of a text that ships with the package and not random ones, because how much a threshold skips
depends on the text; every engine gets the same ids. Rounds go A B A B, so that a change of the machine's clock meets
all of them alike, and one untimed round comes first.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinfer.bench.machine import commit, cpu
from thinfer.bench.worker import Sample, Worker
from thinfer.core.artifact import read_document
from thinfer.engine.artifacts import find_artifact
from thinfer.engine.options import EngineOptions
from thinfer.errors import UsageError
from thinfer.formats.checkpoint import Checkpoint, open_checkpoint

START_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Test:
    """``Test("pp", 512)`` or ``Test("tg", 128)``."""

    __test__ = False  # not a test of pytest's

    kind: str
    tokens: int

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128."""
        return f"{self.kind}{self.tokens}"

    @property
    def positions(self) -> int:
        """Tokens in the context at the end."""
        return self.tokens + (START_TOKENS if self.kind == "tg" else 0)


@dataclass(slots=True)
class Contender:
    """One engine with one model in its own process.

    Attributes:
        facts: what its rows say about it: model, size_bytes, n_params, backend, threads, sparsity, commit.
        tokens: ids to run, enough for the longest test.
        is_peer: whether it is another engine.
        notes: what the engine said at start-up.
        samples: the timed rounds of every test.
    """

    worker: Worker
    facts: Mapping[str, Any]
    tokens: Sequence[int]
    is_peer: bool = False
    notes: Sequence[str] = ()
    samples: dict[Test, list[Sample]] = field(default_factory=dict)

    def round(self, test: Test, *, operations: bool = False) -> Sample:
        """Run the test once."""
        if test.kind == "pp":
            return self.worker.prefill(self.tokens[: test.tokens], operations=operations)
        start, rest = self.tokens[:START_TOKENS], self.tokens[START_TOKENS : START_TOKENS + test.tokens]
        return self.worker.decode(start, rest, operations=operations)


def open_contender(reference: str, options: Mapping[str, Any], tests: Sequence[Test]) -> Contender:
    """Start a worker for a model; raises what opening the model raises."""
    checkpoint = open_checkpoint(reference)
    try:
        facts = model_facts(reference, checkpoint, sparse=bool(options.get("sparsity", True)))
    finally:
        checkpoint.close()
    worker = Worker.ours()
    try:
        text_tokens = max(test.positions for test in tests)
        loaded = worker.load({"model": reference, "text_tokens": text_tokens, **options})
    except BaseException:
        worker.close()
        raise
    facts |= {"backend": loaded["backend"], "threads": loaded["threads"], "commit": commit()}
    return Contender(worker, facts, loaded["tokens"], notes=loaded["notes"])


def model_facts(reference: str, checkpoint: Checkpoint, *, sparse: bool) -> dict[str, Any]:
    """Size, parameters, the base file and the sparsity that was asked of calibration (0: dense)."""
    parameters = 0
    for info in checkpoint.tensors.values():
        count = 1
        for size in info.shape:
            count *= size
        parameters += count
    sparsity = 0.0
    found = find_artifact(checkpoint, EngineOptions(sparsity=sparse))
    if found.selector is not None and found.folder is not None:
        sparsity = calibrated_sparsity(read_document(found.folder)["sections"])
    return {
        "model": reference,
        "path": str(checkpoint.path),
        "size_bytes": checkpoint.size_bytes,
        "n_params": parameters,
        "sparsity": sparsity,
    }


def calibrated_sparsity(sections: Mapping[str, Any]) -> float:
    """The fraction of the block weights' bytes that the calibrated rates leave out."""
    return float(sections.get("calibration", {}).get("sparsity", 0.0))


def measure(
    contenders: Sequence[Contender],
    tests: Sequence[Test],
    rounds: int,
    *,
    operations: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Run every test in interleaved rounds.

    Args:
        contenders: engines, in the order of a round.
        tests: what to run.
        rounds: timed rounds of every test.
        operations: also measure time and bytes by kind of node, in a round of its own that is not counted.
        progress: told what runs now.

    Returns:
        One row a contender and test, in the order of the tests; see `row` for the fields.
    """
    if rounds < 1:
        raise UsageError("a benchmark needs at least one round (-r)")
    rows = []
    for test in tests:
        for number in range(rounds + 1):
            for contender in contenders:
                label = "warm-up" if number == 0 else f"round {number} of {rounds}"
                progress(f"{test.name} {label}: {contender.facts['model']} ({contender.facts['backend']})")
                sample = contender.round(test)
                if number > 0:
                    contender.samples.setdefault(test, []).append(sample)
        made = [row(contender, test) for contender in contenders]
        add_ratios(made, contenders)
        if operations:
            for contender, line in zip(contenders, made, strict=True):
                if not contender.is_peer:
                    line["operations"] = list(contender.round(test, operations=True).operations)
        rows += made
    return rows


def row(contender: Contender, test: Test) -> dict[str, Any]:
    """The figures of one contender in one test, ready for JSON; speeds are tokens a second."""
    samples = contender.samples[test]
    speeds = [test.tokens / sample.seconds for sample in samples]
    counted = [sample.bytes_per_token for sample in samples if sample.bytes_per_token is not None]
    facts = contender.facts
    return {
        "model": facts["model"],
        "size_bytes": facts["size_bytes"],
        "n_params": facts["n_params"],
        "backend": facts["backend"],
        "threads": facts["threads"],
        "test": test.name,
        "t_s_median": statistics.median(speeds),
        "t_s_stddev": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "samples": speeds,
        "sparsity": facts["sparsity"],
        "density": statistics.fmean(sample.density for sample in samples),
        "bytes_per_token": statistics.fmean(counted) if counted else None,
        "rss_bytes": contender.worker.rss_bytes(),
        "commit": facts["commit"],
        "cpu": cpu(),
    }


def add_ratios(rows: Sequence[dict[str, Any]], contenders: Sequence[Contender]) -> None:
    """Add ``ratio_median``, our median speed over the peer's on the same file, to our rows of one test."""
    peers = {
        contender.facts["path"]: line["t_s_median"]
        for contender, line in zip(contenders, rows, strict=True)
        if contender.is_peer
    }
    for contender, line in zip(contenders, rows, strict=True):
        if not contender.is_peer and contender.facts["path"] in peers:
            line["ratio_median"] = line["t_s_median"] / peers[contender.facts["path"]]
