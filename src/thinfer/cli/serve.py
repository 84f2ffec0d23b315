"""``thinfer serve``: OpenAI's API on one model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError

if TYPE_CHECKING:
    from thinfer import LLM


@opt.with_engine_options()
def serve(
    *,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Instead of -m.")] = None,
    model: opt.Model = None,
    host: Annotated[
        str, typer.Option("--host", envvar="THINFER_HOST", help="0.0.0.0 lets other machines in; set a key then.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, envvar="THINFER_PORT", help="0: any free one.")
    ] = 8737,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="THINFER_API_KEY", help="Wanted from clients. A flag shows in process lists."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            envvar="THINFER_SERVED_MODEL_NAME",
            help="What requests call the model; may be repeated. [default: the file's or folder's name]",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=1, max=1024, envvar="THINFER_MAX_NUM_SEQS", help="Run together.")
    ] = 16,
    max_waiting: Annotated[
        int,
        typer.Option("--max-waiting", min=0, envvar="THINFER_MAX_WAITING", help="More waiting ones are refused (429)."),
    ] = 128,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens",
            min=1,
            envvar="THINFER_KV_TOKENS",
            help="Tokens of keys and values that all requests share. [default: 4 times --max-model-len]",
        ),
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            envvar="THINFER_PREFIX_CACHE",
            help="Prompts that begin alike share what was computed; changes no token.",
        ),
    ] = True,
    request_timeout: Annotated[
        float,
        typer.Option("--request-timeout", min=1, envvar="THINFER_REQUEST_TIMEOUT", help="Seconds for one request."),
    ] = 600,
    drain_timeout: Annotated[
        int,
        typer.Option(
            "--drain-timeout", min=0, envvar="THINFER_DRAIN_TIMEOUT", help="Seconds that SIGTERM leaves to requests."
        ),
    ] = 30,
    max_body_mib: Annotated[
        int, typer.Option("--max-body-mib", min=1, envvar="THINFER_MAX_BODY_MIB", help="Largest body of a request.")
    ] = 4,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", envvar="THINFER_CORS_ORIGIN", help="Pages that may call; may be repeated."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            envvar="THINFER_ALLOWED_HOST",
            help="Further name in Host headers; * is any. Checked on loopback addresses without --api-key.",
        ),
    ] = None,
    engine: dict[str, Any],
    chat_template: opt.ChatTemplate = None,
    quiet: opt.Quiet = False,
) -> None:
    """Serve OpenAI's API, metrics and a page to chat on, until SIGTERM or Ctrl-C.

    The port is open at once and /health answers 503 until the model is loaded. Each option can be given as a variable
    THINFER_<OPTION> too; flags come first.
    """
    reference, rest = opt.one_model(model, arguments or [], "serve")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise UsageError("--api-key must be printable ASCII text")
    template = opt.template_text(chat_template)
    names = tuple(served_model_name or [default_name(reference)])

    try:
        import fastapi  # noqa: F401  (the first of the libraries that the server needs)
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f"serve needs {error.name}: pip install 'thinfer[serve]'") from None
    from thinfer import LLM
    from thinfer.server.run import bind
    from thinfer.server.run import serve as run
    from thinfer.server.state import ServerSettings, ServerState

    settings = ServerSettings(
        names=names,
        api_key=api_key,
        max_waiting=max_waiting,
        max_body_bytes=max_body_mib << 20,
        request_seconds=request_timeout,
        cors_origins=tuple(cors_origin or ()),
        host_names=None if api_key is not None else host_names(host, allowed_host or ()),
    )
    engine = engine | {"max_sequences": max_num_seqs, "kv_tokens": kv_tokens, "prefix_cache": prefix_cache}
    listener = bind(host, port)
    shown_host = f"[{host}]" if ":" in host else host
    address = f"http://{shown_host}:{listener.getsockname()[1]}"

    def ready(llm: "LLM") -> None:
        if not quiet:
            opt.say([*llm.describe(), f"ready     {', '.join(names)}"])

    # Said even when quiet: with --port 0 nothing else tells where the server is.
    opt.say([f"serving   {address}  /v1  /metrics  (loading {names[0]})"])
    state = ServerState(settings, lambda: LLM(reference, chat_template=template, **engine), ready=ready)
    run(state, listener, drain_seconds=drain_timeout)


def host_names(host: str, allowed: Sequence[str]) -> tuple[str, ...] | None:
    """What a server is called in Host headers; None where any name will do.

    A server on a loopback address has no names but those of its own machine. Elsewhere its names are not known.

    Example:
        >>> host_names("127.0.0.1", ["llm.home"]), host_names("0.0.0.0", [])
        (('llm.home',), None)
    """
    loopback = host in ("localhost", "::1") or host.startswith("127.")
    return tuple(name.lower() for name in allowed) if loopback and "*" not in allowed else None


def default_name(reference: str) -> str:
    """What a model is called: the name of its file or folder, or its hub id; never a path.

    Example:
        >>> default_name("no/such-folder")
        'no/such-folder'
    """
    path = Path(reference)
    if path.is_file():
        return path.stem
    if path.is_dir():
        return path.resolve().name or "model"
    return reference
