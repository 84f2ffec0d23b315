"""``thinfer profile``: which neurons and heads of a model are active."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt


@opt.with_places("profile", what="Folder to write; it points to MODEL.", shown="<path>")
@opt.with_observing_options()
def profile(
    *,
    places: opt.Places,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help="UTF-8 text to observe; several are compared. [default: an excerpt that ships with thinfer]",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of all texts together.")] = 8192,
    seq_len: Annotated[int, typer.Option("--seqlen", min=2, help="Tokens of a window.")] = 512,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which windows.")] = 0,
    plot: Annotated[bool, typer.Option("--plot", help="Draw power-law.png, sparsity.png and union.png.")] = False,
    engine: dict[str, Any],
    quiet: opt.Quiet = False,
) -> None:
    """Count which FFN neurons fire and how large what the heads add is, on a text run densely.

    Writes thinfer.json and thinfer.safetensors, tied to the weights by hash; stdout has the figures as JSON: exact
    zeros by layer, the share of neurons that makes 80 % of the activations, reuse from token to token, how the sets of
    a batch unite, overlap between texts.
    """
    from thinfer.activation.profile import profile as make
    from thinfer.activation.profile_plot import plot_profile, require_plots

    if plot:
        require_plots()
    with opt.status() as progress:
        found, report = make(
            places.model,
            places.out,
            texts=text or (),
            progress=progress,
            tokens=tokens,
            seq_len=seq_len,
            seed=seed,
            **engine,
        )
    pictures = plot_profile(found, places.out, Path(places.model).name) if plot else []
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if not quiet:
        share = report["neurons_for_80"]["count"]["model"]
        opt.say(
            [
                f"{report['exact_zeros']:.1%} of the activations are exactly zero; {share:.1%} of the neurons make "
                "80 % of those that are not",
                f"wrote {places.out}" + (f" with {', '.join(path.name for path in pictures)}" if pictures else ""),
            ]
        )
