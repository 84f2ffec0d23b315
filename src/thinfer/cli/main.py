"""The ``thinfer`` command: its verbs, and how failures become a message and an exit code."""

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from thinfer.cli import (
    bench,
    bench_batch,
    bench_ffn,
    bench_prune,
    bench_serve,
    calibrate,
    contextual,
    demo,
    eval_tasks,
    evaluate,
    export,
    info,
    predict,
    profile,
    prune,
    recover,
    relufy,
    run,
    serve,
)
from thinfer.errors import ThinferError

_INTERRUPTED = 130
_BROKEN_PIPE = 141


class VerbGroup(TyperGroup):
    """Runs a verb; a failure is one line on stderr and the exit code of its class."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen verb (``ctx`` is the parsed command line) and translate what it raises."""
        debug = os.environ.get("THINFER_DEBUG", "") not in ("", "0")
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output has gone. Python would complain again when it flushes at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_BROKEN_PIPE) from None
        except ThinferError as error:
            _complain(str(error), debug)
            raise typer.Exit(error.exit_code) from None
        except MemoryError:
            _complain("out of memory; choose a smaller model, --max-model-len or --kv-type f16", debug)
            raise typer.Exit(7) from None
        except OSError as error:
            _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), debug)
            raise typer.Exit(1) from None
        except Exception as error:
            if type(error).__module__.startswith(("typer", "click")):
                raise
            hint = "" if debug else "; THINFER_DEBUG=1 shows where"
            _complain(f"internal error: {type(error).__name__}: {error}{hint}", debug)
            raise typer.Exit(1) from None
        return result


def _complain(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"thinfer: error: {message}", file=sys.stderr)


# The plain help: rich's costs a tenth of a second at every --help.
app = typer.Typer(cls=VerbGroup, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def thinfer(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Run large language models on the weights that matter for each token.

    MODEL is a .gguf file, a Hugging Face folder, a folder that `thinfer calibrate` wrote, or a hub id.
    stdout is data, stderr is talk. Exit codes: 0 success, 1 failure, 2 usage, 3 check failed, 4 broken or missing
    model file, 5 not supported, 6 stale artifact, 7 memory or context, 8 peer missing, 130 interrupted.
    """
    if version:
        from thinfer import __version__

        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


app.command("run")(run.run)
app.command("serve")(serve.serve)
app.add_typer(bench.app, name="bench")
bench.app.command("batch")(bench_batch.batch)
bench.app.command("serve")(bench_serve.serve)
bench.app.command("ffn")(bench_ffn.ffn)
bench.app.command("prune")(bench_prune.prune)
app.add_typer(evaluate.app, name="eval")
evaluate.app.command("tasks")(eval_tasks.tasks)
app.command("calibrate")(calibrate.calibrate)
app.command("profile")(profile.profile)
app.command("contextual")(contextual.contextual)
app.add_typer(predict.app, name="predict")
app.command("recover")(recover.recover)
app.command("relufy")(relufy.relufy)
app.command("export")(export.export)
app.add_typer(prune.app, name="prune")
app.command("info")(info.info)
app.command("demo")(demo.demo)


def main() -> None:
    """Entry point of the ``thinfer`` command."""
    # A caller may have closed a standard stream; Python has None there, and the next file opened would take its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    app(prog_name="thinfer")
