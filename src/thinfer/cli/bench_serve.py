"""``thinfer bench serve``: a running server under load."""

import json
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError


class Output(StrEnum):
    """Format of the result on stdout."""

    md = "md"
    json = "json"


def serve(
    *,
    url: Annotated[str, typer.Option("--url", "--base-url", help="Of the server.")] = "http://127.0.0.1:8737",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A name the server knows. [default: its first]")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="THINFER_API_KEY")] = None,
    request_rate: Annotated[
        str, typer.Option("--request-rate", metavar="R", help="Mean requests a second (Poisson); inf: all at once.")
    ] = "inf",
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests to send.")] = 100,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, help="Most requests under way. [default: no limit]")
    ] = None,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens of an answer.")] = 128,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.csv",
            help="Lengths instead of --input-len and --output-len: columns ContextTokens, GeneratedTokens.",
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput", metavar="NAME:MS", help="Limit of a good request: ttft, tpot or e2el; may be repeated."
        ),
    ] = None,
    metric_percentiles: Annotated[
        str, typer.Option("--metric-percentiles", metavar="P[,P...]", help="Percentiles to report.")
    ] = "99",
    seed: Annotated[int, typer.Option("--seed", "-s", help="Of prompts and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one request.")] = 600,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format on stdout.")] = Output.md,
) -> None:
    """Load a server with streamed completions and report throughput, goodput and latencies in vLLM's words.

    Prompts are pieces of a text that ships with thinfer, tokenised by the server; answers have exactly the tokens that
    are asked for. TTFT: time to first token. TPOT: time per output token after the first. ITL: from one piece of an
    answer to the next. E2EL: the whole request.
    """
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise UsageError("bench serve needs httpx: pip install 'thinfer[serve]'") from None
    from thinfer.bench.load import LoadClient
    from thinfer.bench.serving import LoadOptions, as_md, measure_serving, parse_goodput
    from thinfer.bench.workload import Length, read_trace

    rate = _numbers(request_rate, "--request-rate")
    if len(rate) != 1 or not rate[0] > 0:
        raise UsageError(f"--request-rate {request_rate}: one number larger than 0 is wanted, or inf")
    percentiles = _numbers(metric_percentiles, "--metric-percentiles")
    if not all(0 <= each <= 100 for each in percentiles):
        raise UsageError(f"--metric-percentiles {metric_percentiles}: numbers from 0 to 100 are wanted")
    if trace is None:
        lengths = [Length(input_len, output_len)] * num_prompts
    else:
        lengths = read_trace(trace)[:num_prompts]
        if len(lengths) < num_prompts:
            raise UsageError(f"--num-prompts {num_prompts}: {trace.name} holds {len(lengths)} requests")
    options = LoadOptions(
        request_rate=rate[0],
        max_concurrency=max_concurrency,
        goodput=parse_goodput(goodput) if goodput else None,
        percentiles=percentiles,
        seed=seed,
    )
    with opt.status() as progress:
        client = partial(LoadClient, url, model=model, api_key=api_key, timeout=timeout)
        result = measure_serving(client, lengths, options, progress=progress)
    sys.stdout.write((json.dumps(result, indent=2) if output is Output.json else as_md(result)) + "\n")


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text}: numbers are wanted") from None
