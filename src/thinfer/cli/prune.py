"""``thinfer prune``: remove weights that a model can do without, and check what was removed."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from inspect import Parameter
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from thinfer.cli import options as opt
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.recipe import Help, Recipe, make_recipe, parse_options


class PruneGroup(TyperGroup):
    """`thinfer prune MODEL` prunes; `thinfer prune verify` and `thinfer prune methods` are verbs of their own."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that the first word names; anything else, a model or an option, goes to pruning itself."""
        # The hidden verb is named by nobody: a folder may have that name.
        if args and args[0] in self.commands and args[0] != _PRUNE:
            return super().resolve_command(ctx, args)
        return "", self.commands[_PRUNE], args

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Hand everything on, so that `thinfer prune --help` and `thinfer prune -m MODEL` reach pruning."""
        return list(super().parse_args(ctx, ["--", *args])) if args else list(super().parse_args(ctx, ["--", "--help"]))


class Output(StrEnum):
    """Format of the result on stdout."""

    text = "text"
    json = "json"


_PRUNE = "model"

app = typer.Typer(cls=PruneGroup, rich_markup_mode=None, help="Remove weights that a model can do without.")


def _flag(row: "dataclasses.Field[Any]", annotated: Any) -> Parameter:
    """The flag of a row of the table; None when it is not given, so that a recipe file can say it."""
    kind, text = get_args(annotated)[:2]
    if not isinstance(text, Help):
        raise TypeError(f"row {row.name} of the recipe table has no help")
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not type(None))
    name = "--" + row.name.replace("_", "-")
    names = [f"{name}/--no-{row.name.replace('_', '-')}"] if kind is bool else [name, *filter(None, [text.flag])]
    if get_origin(kind) in (tuple, dict):
        kind = list[str]
    default = row.default
    shown = (
        ""
        if default in (None, (), False) or row.default_factory is not dataclasses.MISSING
        else f" [default: {default}]"
    )
    option = typer.Option(*names, help=text.text + shown, show_default=False)
    return Parameter(row.name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def with_recipe_options() -> Callable[[opt.Command], opt.Command]:
    """Decorate a verb: in place of its parameter ``given`` it shows a flag for every row of the recipe table.

    The verb receives the rows that were given as ``given``, by name.
    """
    hints = get_type_hints(Recipe, include_extras=True)

    def make(**given: Any) -> dict[str, Any]:
        if given["set"]:
            given["set"] = parse_options(given["set"])
        # A repeated option that was not given may be an empty list instead of None.
        return {name: value for name, value in given.items() if value is not None and value != []}

    return opt.with_options("given", [_flag(row, hints[row.name]) for row in dataclasses.fields(Recipe)], make)


@app.command(_PRUNE, hidden=True)
@with_recipe_options()
def prune(
    *,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Instead of -m.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write; it must not exist yet.")] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="YAML file with these options as keys; flags override it.")
    ] = None,
    given: dict[str, Any],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only predict memory, time and size; measures this machine for seconds.")
    ] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Prune MODEL and write an ordinary Hugging Face folder with recipe.yaml, report.json and a model card.

    stdout has the report as JSON, without its part for every matrix. Ctrl-C keeps finished blocks in OUT.partial; the
    same command goes on after them. Also: `thinfer prune verify DIR` counts zeros, `thinfer prune methods` lists
    methods and their options.
    """
    if arguments:
        given["model"], rest = opt.one_model(given.get("model"), arguments, "prune")
        if rest:
            raise UsageError(f"unexpected argument {rest[0]!r}")
    made = make_recipe(given, recipe)
    if made.model is None:
        raise UsageError("which model? thinfer prune MODEL -o DIR")
    if out is None and not dry_run:
        raise UsageError("where to write? -o DIR")
    from thinfer.pruning.checkpoint import require_torch

    require_torch()
    if dry_run:
        from thinfer.pruning.estimate import estimate

        with _bar() as tell:
            predicted = estimate(made, progress=lambda what: tell(0, 0, what))
        sys.stdout.write(json.dumps(predicted, indent=2) + "\n")
        return
    from thinfer.pruning.run import partial_folder
    from thinfer.pruning.run import prune as run

    assert out is not None  # noqa: S101 - checked above
    try:
        with _bar() as tell:
            report = run(made, out, progress=tell)
    except KeyboardInterrupt:
        if partial_folder(out).is_dir():
            opt.say([f"interrupted; finished blocks are kept in {partial_folder(out)}: the same command resumes"])
        raise
    summary = {name: value for name, value in report.items() if name not in ("matrices", "structure")}
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    if not quiet:
        opt.say([*report["notes"], f"wrote {out}; check it with: thinfer prune verify {out}"])


@app.command("verify")
def verify(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder that was pruned, or any model.")],
    pattern: Annotated[
        str | None, typer.Option("--pattern", help="What must hold, as 2:4. [default: what the folder's report says]")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format on stdout.")] = Output.text,
) -> None:
    """Count the zeros of every pruned matrix and check the pattern; exit code 3 when it does not hold.

    Where the folder has no report.json, all matrices of blocks are counted, and the pattern is the one that is found.
    """
    from thinfer.core.pattern import SparsityPattern
    from thinfer.pruning.verify import verify as check

    found = check(folder, SparsityPattern.parse(pattern) if pattern else None)
    if output is Output.json:
        sys.stdout.write(json.dumps(found.to_dict()) + "\n")
    else:
        width = max(len(row.name) for row in found.tensors)
        for row in found.tensors:
            state = "" if row.pattern_ok else f"  not {found.pattern}"
            sys.stdout.write(f"{row.name:{width}}  {row.zeros / max(1, row.size):7.2%}{state}\n")
        sys.stdout.write(f"{len(found.tensors)} matrices, {found.sparsity:.4%} zeros, pattern {found.pattern}\n")
    if found.problems:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        raise CheckFailed(f"{folder}: {found.problems[0]}{more}")


@app.command("methods")
def methods(
    output: Annotated[Output, typer.Option("--output", "-o", help="Format on stdout.")] = Output.text,
) -> None:
    """List the methods, allocations and refinements, with their options and defaults."""
    from thinfer.pruning.base import make, names
    from thinfer.pruning.checkpoint import require_torch
    from thinfer.pruning.recipe import describe

    require_torch()
    kinds = {"method": "", "structured method": "structured", "allocation": "allocation", "refinement": "refine"}
    rows = [{"kind": word, **describe(make(name, kind=kind))} for word, kind in kinds.items() for name in names(kind)]
    if output is Output.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    for row in rows:
        settings = " ".join(f"{name}={value}" for name, value in row.items() if name not in ("kind", "name"))
        sys.stdout.write(f"{row['kind']:17}  {row['name']:16}  {settings}\n")


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """A function that shows steps done, of how many, and what runs; on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total or None, description=what)
