"""A server under load: throughput, goodput and latencies in the words and names of vLLM's serving benchmark."""

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinfer.bench.load import LoadClient, ServerFailure, Timed
from thinfer.bench.report import table
from thinfer.bench.workload import Length, fit, plan
from thinfer.data import evaluation_text
from thinfer.errors import UsageError

# TTFT: from sending to the first token. TPOT: mean of a request's times from token to token. ITL: each of these times.
# E2EL: from sending to the end.
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
_GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a server is loaded.

    Attributes:
        request_rate: mean arrivals a second; infinity sends all at once.
        max_concurrency: most requests under way; None: no limit.
        goodput: most milliseconds of a good request, by "ttft", "tpot" or "e2el"; empty: goodput is not computed.
        percentiles: which ones are reported, between 0 and 100.
        seed: of prompts and arrivals.
    """

    request_rate: float = math.inf
    max_concurrency: int | None = None
    goodput: Mapping[str, float] | None = None
    percentiles: Sequence[float] = (99,)
    seed: int = 0


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Limits as vLLM writes them.

    Example:
        >>> parse_goodput(["ttft:500", "tpot:50"])
        {'ttft': 500.0, 'tpot': 50.0}
    """
    limits = {}
    for item in ",".join(given).replace(" ", ",").split(","):
        name, _, value = item.partition(":")
        try:
            milliseconds = float(value) if name in _GOODPUT else math.nan
        except ValueError:
            milliseconds = math.nan
        if not milliseconds > 0:
            raise UsageError(f"--goodput {item}: NAME:MILLISECONDS is wanted, NAME one of {', '.join(_GOODPUT)}")
        limits[name] = milliseconds
    return limits


def measure_serving(
    client: Callable[[], LoadClient],
    lengths: Sequence[Length],
    options: LoadOptions,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Load a server and report what its clients saw; one request goes ahead, untimed.

    Args:
        client: makes the client.
        lengths: of every request.
        options: how to load it.
        progress: told how many requests have ended.

    Returns:
        Figures by vLLM's names, ready for JSON: latencies in milliseconds, throughputs a second.

    Raises:
        ServerFailure: the server cannot be reached, or no request succeeded.
    """
    return asyncio.run(_measure(client, lengths, options, progress))


async def _measure(
    make: Callable[[], LoadClient],
    lengths: Sequence[Length],
    options: LoadOptions,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    async with make() as client:
        model = await client.open()
        text = await client.tokenize(evaluation_text())
        planned = plan(lengths, text, rate=options.request_rate, context=model.context, seed=options.seed)
        # Of its own text, so that the test proper finds nothing of it in a cache.
        (ahead,) = plan([Length(8, 2)], text[::-1])
        failed = (await client.send(ahead)).error
        if failed is not None:
            raise ServerFailure(f"the server does not do a small request: {failed}")
        timed = await client.run(planned, max_concurrency=options.max_concurrency, progress=progress)
    cut = 0 if model.context is None else sum(fit(length, model.context) != length for length in lengths)
    return {"model": model.name, "cut_requests": cut, **summary(timed, options)}


def summary(timed: Sequence[Timed], options: LoadOptions) -> dict[str, Any]:
    """The figures of a load test.

    Raises:
        ServerFailure: no request succeeded.
    """
    good = [each for each in timed if each.error is None]
    errors = Counter(each.error for each in timed if each.error is not None)
    if not good:
        reason = errors.most_common(1)[0][0] if errors else "there were none"
        raise ServerFailure(f"none of {len(timed)} requests succeeded; most often: {reason}")
    seconds = max(each.started + each.whole for each in timed) - min(each.started for each in timed)
    outputs = sum(each.output_tokens for each in good)
    inputs = sum(each.prompt_tokens for each in good)
    rate = options.request_rate
    result: dict[str, Any] = {
        "num_prompts": len(timed),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "completed": len(good),
        "failed": len(timed) - len(good),
        "errors": dict(errors.most_common()),
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_cached_tokens": sum(each.cached_tokens for each in good),
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "peak_concurrent_requests": _peak(timed),
    }
    if options.goodput:
        result["goodput"] = dict(options.goodput)
        result["request_goodput"] = sum(_is_good(each, options.goodput) for each in good) / seconds
    for name, values in _latencies(good).items():
        result |= _distribution(name, values, options.percentiles)
    return result


def _latencies(good: Sequence[Timed]) -> dict[str, list[float]]:
    """Milliseconds of every kind."""
    return {
        "ttft": [each.first * 1e3 for each in good],
        "tpot": [each.per_token * 1e3 for each in good if each.per_token is not None],
        "itl": [value * 1e3 for each in good for value in each.between],
        "e2el": [each.whole * 1e3 for each in good],
    }


def _distribution(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {f"mean_{name}_ms": None}
    result: dict[str, float | None] = {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
    }
    for percentile in percentiles:
        result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return result


def _is_good(timed: Timed, limits: Mapping[str, float]) -> bool:
    seconds = {"ttft": timed.first, "tpot": timed.per_token or 0.0, "e2el": timed.whole}
    return all(seconds[name] * 1e3 <= limit for name, limit in limits.items())


def _peak(timed: Sequence[Timed]) -> int:
    """Most requests that were under way at once."""
    # An end comes before a start of the same moment.
    changes = sorted([(each.started, 1) for each in timed] + [(each.started + each.whole, -1) for each in timed])
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def as_md(result: Mapping[str, Any]) -> str:
    """Throughputs and latencies as two Markdown tables."""
    overall = [
        ("Successful requests", f"{result['completed']} of {result['num_prompts']}"),
        ("Benchmark duration (s)", f"{result['duration']:.2f}"),
        ("Input tokens", str(result["total_input_tokens"])),
        ("of them cached", str(result["total_cached_tokens"])),
        ("Output tokens", str(result["total_output_tokens"])),
        ("Request throughput (req/s)", f"{result['request_throughput']:.2f}"),
        ("Output token throughput (tok/s)", f"{result['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{result['total_token_throughput']:.2f}"),
        ("Peak concurrent requests", str(result["peak_concurrent_requests"])),
    ]
    if "request_goodput" in result:
        limits = ", ".join(f"{name} {value:g} ms" for name, value in result["goodput"].items())
        overall.insert(6, (f"Request goodput (req/s; {limits})", f"{result['request_goodput']:.2f}"))
    if result["cut_requests"]:
        overall.append(("Requests cut to the context", str(result["cut_requests"])))
    percentiles = [key.removesuffix("_e2el_ms") for key in result if key.endswith("_e2el_ms")]
    body = [
        [shown, *(_cell(result.get(f"{each}_{name}_ms")) for each in percentiles)] for name, shown in LATENCIES.items()
    ]
    head = ["ms", *(each.replace("p", "P", 1) if each[1:2].isdigit() else each for each in percentiles)]
    parts = [table(["serving", result["model"]], overall), table(head, body)]
    if result["errors"]:
        failures = [[error, str(count)] for error, count in result["errors"].items()]
        parts.append(table(["failure", "requests"], failures))
    return "\n\n".join(parts)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
