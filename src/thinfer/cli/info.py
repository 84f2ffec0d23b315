"""``thinfer info``: what this machine and this model run with."""

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError


class Output(StrEnum):
    """Format on stdout."""

    text = "text"
    json = "json"


@opt.with_engine_options()
def info(
    *,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Instead of -m.")] = None,
    model: opt.Model = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format on stdout.")] = Output.text,
    engine: dict[str, Any],
) -> None:
    """Show the instruction sets, threads and read bandwidth of this machine; with a model also its facts and plan.

    The plan says for every tensor the codec and layout it gets in memory, and why.
    """
    rest = list(arguments or [])
    if model is None and rest:
        model, *rest = rest
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}")
    if model is not None:
        model = opt.named(model, "-m")
    from thinfer.bench.facts import machine_facts, model_facts

    shown: dict[str, Any] = {"machine": machine_facts(engine["threads"], engine["isa"])}
    if model is not None:
        shown["model"] = model_facts(model, engine)
    if output is Output.json:
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        sys.stdout.write("\n\n".join(_section(section) for section in shown.values()) + "\n")


def _section(facts: Mapping[str, Any]) -> str:
    """Names and values in two columns; lists of lines below their name; tables of rows as Markdown."""
    from thinfer.bench.report import as_plain_md

    width = max(len(name) for name in facts) + 2
    lines = []
    for name, value in facts.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += ["", name, as_plain_md(value)]
        elif isinstance(value, list) and name == "plan":
            lines += ["", *value]
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            lines.append(f"{name:<{width}}{text}")
    return "\n".join(lines)
