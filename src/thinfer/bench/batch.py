"""Decode speed of several streams together, in interleaved rounds.

Our streams run through the scheduler as the server runs them: batches, sampling and text included. Another engine gets
the same prompts and the tokens that ours chose, a token of every stream in each of its batches, and neither samples nor
makes text; so its figures are its best. The untimed first round also counts how many of these tokens the other engine
finds the likeliest, which shows that both compute the same.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from thinfer.bench.machine import cpu
from thinfer.bench.throughput import START_TOKENS, Contender, Test, add_ratios
from thinfer.bench.worker import StreamsSample
from thinfer.errors import UsageError

_KV_BLOCK = 64


def engine_needs(levels: Sequence[int], steps: int) -> dict[str, int]:
    """Options of our engine with which no stream waits for another: places to run, and a KV pool for all of them.

    Example:
        >>> engine_needs([1, 4], 100)
        {'max_sequences': 4, 'kv_tokens': 976}
    """
    most = max(levels)
    return {"max_sequences": most, "kv_tokens": most * (Test("tg", steps).positions + 2 * _KV_BLOCK)}


def prompts_of(tokens: Sequence[int], streams: int) -> list[list[int]]:
    """A short prompt for every stream, from places of the text that lie evenly apart."""
    text = [*tokens, *tokens[:START_TOKENS]]
    starts = [place * len(tokens) // streams for place in range(streams)]
    return [text[start : start + START_TOKENS] for start in starts]


def measure_streams(
    contenders: Sequence[Contender],
    levels: Sequence[int],
    steps: int,
    rounds: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Time every number of streams.

    Args:
        contenders: engines in the order of a round, each peer after the one of ours that has its file.
        levels: numbers of streams.
        steps: timed steps of a round, a token of every stream each.
        rounds: timed rounds.
        progress: told what runs now.

    Returns:
        One row a level and contender; speeds are tokens a second of all streams together, times milliseconds.
    """
    if rounds < 1 or steps < 1:
        raise UsageError("a benchmark needs at least one round (-r) of one step (-n)")
    rows = []
    for streams in levels:
        samples: list[list[StreamsSample]] = [[] for _ in contenders]
        agreements: list[float | None] = [None] * len(contenders)
        for number in range(rounds + 1):
            answers: dict[str, Sequence[Sequence[int]]] = {}
            for place, contender in enumerate(contenders):
                label = "warm-up" if number == 0 else f"round {number} of {rounds}"
                progress(f"{streams} streams {label}: {contender.facts['model']} ({contender.facts['backend']})")
                sample = contender.worker.streams(
                    prompts_of(contender.tokens, streams),
                    steps,
                    answers=answers[contender.facts["path"]] if contender.is_peer else None,
                    check=contender.is_peer and number == 0,
                )
                if number:
                    samples[place].append(sample)
                else:
                    agreements[place] = sample.agreement
                answers.setdefault(contender.facts["path"], sample.answers)
        made = [
            row(contender, streams, steps, taken) | {"agreement": agreement}
            for contender, taken, agreement in zip(contenders, samples, agreements, strict=True)
        ]
        add_ratios(made, contenders)
        rows += made
    return rows


def row(contender: Contender, streams: int, steps: int, samples: Sequence[StreamsSample]) -> dict[str, Any]:
    """The figures of one contender at one level, ready for JSON.

    A step gives every stream one token, so the time of a step is the time between two tokens of a stream.
    """
    speeds = [streams * len(sample.step_seconds) / sum(sample.step_seconds) for sample in samples]
    between = np.concatenate([sample.step_seconds for sample in samples]) * 1e3
    counted = [sample.bytes_per_token for sample in samples if sample.bytes_per_token is not None]
    facts: Mapping[str, Any] = contender.facts
    return {
        **{name: facts[name] for name in ("model", "size_bytes", "n_params", "backend", "threads")},
        "test": f"tg{steps}",
        "streams": streams,
        "t_s_median": statistics.median(speeds),
        "t_s_stddev": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "samples": speeds,
        "median_itl_ms": float(np.median(between)),
        "p99_itl_ms": float(np.percentile(between, 99)),
        "sparsity": facts["sparsity"],
        "density": statistics.fmean(sample.density for sample in samples),
        "bytes_per_token": statistics.fmean(counted) if counted else None,
        "rss_bytes": contender.worker.rss_bytes(),
        "commit": facts["commit"],
        "cpu": cpu(),
    }
