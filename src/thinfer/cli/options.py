"""Options that several verbs share, and what they mean to the engine."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.engine.cores import MAX_THREADS
from thinfer.errors import UsageError


class Weights(StrEnum):
    """Precision of the packed weights."""

    stored = "stored"
    q4 = "q4"
    q8 = "q8"
    f16 = "f16"


class Activations(StrEnum):
    """Precision of the activations in a product."""

    int8 = "int8"
    f32 = "f32"


class KvType(StrEnum):
    """Type of keys and values in memory."""

    f16 = "f16"
    f32 = "f32"


class ExecutorName(StrEnum):
    """What runs the graph."""

    auto = "auto"
    cpu = "cpu"
    reference = "reference"


class Layout(StrEnum):
    """How matrices with thresholds lie in memory."""

    auto = "auto"
    rows = "rows"
    columns = "columns"


class Neurons(StrEnum):
    """Whether FFN neurons that do not fire are skipped."""

    auto = "auto"
    skip = "skip"
    off = "off"


MODEL_HELP = (
    "A .gguf file, a Hugging Face folder, a folder that `thinfer calibrate` or `predict train` wrote, or a hub id."
)

Model = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", "-t", min=1, max=MAX_THREADS, envvar="THINFER_THREADS", help="Default: one for each core."
    ),
]
WeightsOption = Annotated[
    Weights,
    typer.Option("--weights", envvar="THINFER_WEIGHTS", help="Re-quantise a float checkpoint at load."),
]
ActivationsOption = Annotated[
    Activations,
    typer.Option("--activations", envvar="THINFER_ACTIVATIONS", help="f32 is exact and slow: the oracle."),
]
Isa = Annotated[
    str | None,
    typer.Option("--isa", envvar="THINFER_ISA", help="Instruction set; default: the best of this machine."),
]
KvTypeOption = Annotated[KvType, typer.Option("--kv-type", envvar="THINFER_KV_TYPE", help="Type of keys and values.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        "--ctx-size",
        "-c",
        min=1,
        envvar="THINFER_MAX_MODEL_LEN",
        help="Most tokens of a sequence; default: the model's maximum, at most 4096.",
    ),
]
Sparsity = Annotated[
    float | None,
    typer.Option("--sparsity", help="0: dense. How sparse a calibrated model runs is set by `thinfer calibrate`."),
]
Executor = Annotated[
    ExecutorName,
    typer.Option("--executor", envvar="THINFER_EXECUTOR", help="reference is NumPy: slow, runs everywhere."),
]
LayoutOption = Annotated[
    Layout,
    typer.Option(
        "--layout",
        envvar="THINFER_LAYOUT",
        help="Of matrices with thresholds: columns skips what is dropped, rows reads it all; auto times both.",
    ),
]
NeuronsOption = Annotated[
    Neurons,
    typer.Option(
        "--neurons",
        envvar="THINFER_NEURONS",
        help="Of ReLU models: skip reads only neurons that fire (or are predicted), off reads all; auto times both.",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option("--chat-template", help="A Jinja template, or a file that holds one."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not say what was chosen at start-up.")]


def one_model(option: str | None, positional: Sequence[str], verb: str) -> tuple[str, list[str]]:
    """The model and the positional arguments that remain: the model is -m, else the first positional argument."""
    if option is not None:
        return named(option, "-m"), list(positional)
    if not positional:
        raise UsageError(f"which model? thinfer {verb} MODEL, or -m MODEL ({MODEL_HELP[0].lower()}{MODEL_HELP[1:-1]})")
    return named(positional[0], "MODEL"), list(positional[1:])


def named(value: str, option: str) -> str:
    """The value; UsageError when it is empty, as an unset variable of a shell makes it."""
    if not value.strip():
        raise UsageError(f"{option} is empty; name a model, file or folder")
    return value


def engine_options(
    *,
    threads: Threads = None,
    weights: WeightsOption = Weights.stored,
    activations: ActivationsOption = Activations.int8,
    isa: Isa = None,
    kv_type: KvTypeOption = KvType.f16,
    max_model_len: MaxModelLen = None,
    sparsity: Sparsity = None,
    executor: Executor = ExecutorName.auto,
    layout: LayoutOption = Layout.auto,
    neurons: NeuronsOption = Neurons.auto,
) -> dict[str, Any]:
    """Keyword arguments of `LLM` and of a benchmark's worker, all plain JSON values.

    The one declaration of the engine's options: verbs take these parameters by `with_engine_options`.
    """
    if sparsity is not None and sparsity != 0:
        raise UsageError(
            f"--sparsity {sparsity:g}: only 0 (dense) can be chosen here; "
            f"`thinfer calibrate MODEL -o DIR --sparsity {sparsity:g}` makes a folder that runs at that level"
        )
    return {
        "threads": threads,
        "weights": weights.value,
        "activations": activations.value,
        "isa": isa,
        "kv_type": kv_type.value,
        "max_model_len": max_model_len,
        "sparsity": sparsity is None,
        "executor": executor.value,
        "layout": layout.value,
        "neurons": neurons.value,
    }


Command = Callable[..., None]


def with_options(place: str, shown: Sequence[Parameter], make: Callable[..., Any]) -> Callable[[Command], Command]:
    """Decorate a verb: instead of its parameter ``place`` it shows others, and receives what ``make`` makes of them.

    Args:
        place: a parameter of the verb.
        shown: keyword parameters with typer's annotations.
        make: takes them by name.

    Example:
        >>> @with_options("engine", list(signature(engine_options).parameters.values()), engine_options)
        ... def verb(*, model: str, engine: dict[str, Any], quiet: bool = False) -> None: ...
        >>> list(signature(verb).parameters)[:3]
        ['model', 'threads', 'weights']
    """

    def decorate(command: Command) -> Command:
        own = signature(command)
        parameters: list[Parameter] = []
        for parameter in own.parameters.values():
            parameters += shown if parameter.name == place else [parameter]

        @wraps(command)
        def verb(**given: Any) -> None:
            made = make(**{option.name: given.pop(option.name) for option in shown})
            command(**given, **{place: made})

        # What typer reads: names and order from the first, types from the second.
        vars(verb)["__signature__"] = own.replace(parameters=parameters)
        verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return verb

    return decorate


def with_engine_options(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Decorate a verb: in place of its parameter ``engine`` it shows the options of `engine_options`.

    The verb receives the result of `engine_options` as ``engine``. Options in ``without`` it does not show; they keep
    their defaults.
    """
    return with_options("engine", _engine_parameters(without), engine_options)


_OBSERVED = ("max_model_len", "sparsity", "layout")


def with_observing_options() -> Callable[[Command], Command]:
    """The same for verbs that observe dense runs on windows of their own length, and so choose what is not shown."""

    def make(**given: Any) -> dict[str, Any]:
        return {name: value for name, value in engine_options(**given).items() if name not in _OBSERVED}

    return with_options("engine", _engine_parameters(_OBSERVED), make)


def _engine_parameters(without: Collection[str]) -> list[Parameter]:
    return [option for option in signature(engine_options).parameters.values() if option.name not in without]


@dataclass(frozen=True, slots=True)
class Places:
    """What a verb reads and what it writes.

    Attributes:
        model: as the user named it.
        out: folder or file to write.
    """

    model: str
    out: str


def with_places(
    verb: str, *, metavar: str = "DIR", source: str = "MODEL", what: str = "Folder to write.", shown: str | None = None
) -> Callable[[Command], Command]:
    """Decorate a verb: in place of its parameter ``places`` it shows MODEL, -m and -o, and receives them as `Places`.

    Args:
        verb: its name on the command line.
        metavar: what messages call the place to write.
        source: what the help calls the model.
        what: help of -o.
        shown: what the help calls the place to write; None: ``metavar``.

    Example:
        >>> @with_places("export", metavar="FILE.gguf")
        ... def export(*, places: Places, quiet: bool = False) -> None: ...
        >>> list(signature(export).parameters)
        ['arguments', 'model', 'out', 'quiet']
    """
    help_of_source = "Instead of -m." if source == "MODEL" else "The pruned model; instead of -m."
    arguments = Annotated[list[str] | None, typer.Argument(metavar=source, help=help_of_source)]
    out = Annotated[str | None, typer.Option("--out", "-o", metavar=shown or metavar, help=what)]

    def make(arguments: list[str] | None, model: str | None, out: str | None) -> Places:
        reference, rest = one_model(model, arguments or [], verb)
        if rest:
            raise UsageError(f"unexpected argument {rest[0]!r}; what to write is given with -o {metavar}")
        if out is None:
            raise UsageError(f"where to write? -o {metavar}")
        return Places(reference, named(out, "-o"))

    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("arguments", arguments), ("model", Model), ("out", out))
    ]
    return with_options("places", parameters, make)


def template_text(chat_template: str | None) -> str | None:
    """The template itself: the content of the file when the option names one."""
    if chat_template is None or "{" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise UsageError(f"--chat-template {chat_template}: neither a file nor a Jinja template")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--chat-template {chat_template}: not UTF-8 at byte {error.start}; convert it first"
        ) from error


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A function that shows what runs now, on a terminal; elsewhere it says nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as spinner:
        yield spinner.update


def say(lines: Sequence[str]) -> None:
    """Print talk on stderr."""
    for line in lines:
        print(line, file=sys.stderr)
