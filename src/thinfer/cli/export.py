"""``thinfer export``: a model folder as a GGUF file."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from thinfer.cli import options as opt


class Type(StrEnum):
    """Type of the matrices in the file."""

    f32 = "f32"
    f16 = "f16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


@opt.with_places("export", metavar="FILE.gguf", what="File to write.")
def export(
    *,
    places: opt.Places,
    kind: Annotated[Type, typer.Option("--type", help="Type of the matrices; vectors stay f32.")] = Type.f16,
    quiet: opt.Quiet = False,
) -> None:
    """Write a Hugging Face folder as a GGUF file, with its tokenizer and chat template.

    Zeros stay zeros in all four types; stdout has the report as JSON, which counts them for every tensor. Layers must
    have one width, since the readers of such files size all layers alike.
    """
    from thinfer.export.gguf import export_gguf

    with opt.status() as progress:
        report = export_gguf(places.model, Path(places.out), kind.value, progress=progress)
    sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    if not quiet:
        opt.say(
            [
                *(f"note: {note}" for note in report.notes),
                f"wrote {places.out}; run it with: thinfer run -m {places.out}",
            ]
        )
