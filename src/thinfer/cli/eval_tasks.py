"""``thinfer eval tasks``: accuracy on multiple-choice and last-word tasks."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.cli.evaluate import Output
from thinfer.errors import UsageError


@opt.with_engine_options()
def tasks(
    *,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Instead of -m.")] = None,
    model: opt.Model = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="NAME,...",
            help="piqa, arc_easy, winogrande, boolq, hellaswag, rte, copa, or .jsonl files.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", envvar="THINFER_TASK_DATA", metavar="DIR", help="Folder with the files of the named tasks."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Documents of each task. [default: all]")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Let the sparsity act as it does at decode.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format on stdout.")] = Output.text,
    engine: dict[str, Any],
    quiet: opt.Quiet = False,
) -> None:
    """Accuracy on tasks in local files, computed by lm-eval, without examples in the prompt.

    A named task is looked for anywhere below DIR: piqa.jsonl, arc_easy.jsonl, winogrande.jsonl, boolq.jsonl,
    copa.jsonl, hellaswag.json, rte/dev.tsv. A file of your own has one JSON object a line: {"query", "choices",
    "gold"}, {"context_options", "continuation", "gold"}, {"context", "continuation"}, or {"text"}, whose last word is
    asked for.
    """
    reference, rest = opt.one_model(model, arguments or [], "eval tasks")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; the tasks are given with --tasks")
    from thinfer.evals.local_tasks import load_tasks
    from thinfer.evals.tasks import require_harness, score_tasks

    require_harness()
    wanted = load_tasks([name.strip() for name in (names or "").split(",") if name.strip()], data)
    from thinfer import LLM

    with LLM(reference, **engine) as llm:
        # Else lm-eval's libraries would ask the network for what is all here.
        os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
        if not quiet:
            opt.say(llm.describe())
        with opt.status() as progress:
            scores = score_tasks(llm, wanted, limit=limit, decode=decode, progress=progress)
    result = {"model": reference, **scores.to_dict()}
    sys.stdout.write((json.dumps(result, indent=2) if output is Output.json else _describe(result)) + "\n")


def _describe(result: dict[str, Any]) -> str:
    """One line a task, the mean, and what the numbers depend on."""
    lines = []
    for name, task in result["results"].items():
        shown = [
            f"{metric} {task[metric]:.4f}"
            + (f" ± {task[f'{metric}_stderr']:.4f}" if f"{metric}_stderr" in task else "")
            for metric in ("acc", "acc_norm", "perplexity")
            if metric in task
        ]
        lines.append(f"{name:<12}{'  '.join(shown)}  ({task['scored']} of {task['documents']})")
    if len(lines) > 1:
        lines.append(f"{'mean acc':<12}{'':<4}{result['mean_acc']:.4f}")
    bos = "with" if result["bos"] else "no"
    lines.append(f"{result['harness']}, no examples in the prompt, {bos} BOS, {result['seconds']:.1f} s")
    return "\n".join(lines)
