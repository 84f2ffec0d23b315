"""``thinfer export``: a model folder as a GGUF file."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError


class Type(StrEnum):
    """Type of the matrices in the file."""

    f32 = "f32"
    f16 = "f16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


def export(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Instead of -m.")] = None,
    model: opt.Model = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE.gguf", help="File to write.")] = None,
    kind: Annotated[Type, typer.Option("--type", help="Type of the matrices; vectors stay f32.")] = Type.f16,
    quiet: opt.Quiet = False,
) -> None:
    """Write a Hugging Face folder as a GGUF file, with its tokenizer and chat template.

    Zeros stay zeros in all four types; stdout has the report as JSON, which counts them for every tensor. Layers must
    have one width, since the readers of such files size all layers alike.
    """
    reference, rest = opt.one_model(model, arguments or [], "export")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; the file to write is given with -o FILE.gguf")
    if out is None:
        raise UsageError("where to write? -o FILE.gguf")
    from thinfer.export.gguf import export_gguf

    with opt.status() as progress:
        report = export_gguf(reference, out, kind.value, progress=progress)
    sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    if not quiet:
        opt.say([*(f"note: {note}" for note in report.notes), f"wrote {out}; run it with: thinfer run -m {out}"])
