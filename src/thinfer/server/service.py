"""Everything beside generation: models, tokens, health, metrics, and what is not there yet."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from thinfer.errors import UnsupportedError
from thinfer.server.chat import prompt_ids
from thinfer.server.failures import ApiError, json_response
from thinfer.server.protocol import DetokenizeRequest, TokenizeRequest
from thinfer.server.replies import FAILURES, Failure, Health, ModelCard, ModelList, Text, TokenizerInfo, Tokens
from thinfer.server.state import ServedModel, state_of

router = APIRouter()
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.head("/health", include_in_schema=False)
@router.get("/health", responses={200: {"model": Health}, 503: {"model": Failure}}, tags=["service"])
async def health(request: Request) -> Response:
    """200 once the model is loaded; 503 before, and while the server ends."""
    state_of(request).require_model()
    return json_response({"status": "ok"})


@router.get(
    "/metrics",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **FAILURES},
    tags=["service"],
)
async def metrics(request: Request) -> Response:
    """Figures in the text format of Prometheus."""
    return Response(state_of(request).metrics.render(), headers={"Content-Type": _METRICS_TYPE})


@router.get("/v1/models", responses={200: {"model": ModelList}, **FAILURES}, tags=["models"])
async def models(request: Request) -> Response:
    """The served model, by each of its names."""
    state = state_of(request)
    model = state.require_model()
    return json_response({"object": "list", "data": [_card(model, name) for name in state.settings.names]})


@router.get("/v1/models/{name:path}", responses={200: {"model": ModelCard}, **FAILURES}, tags=["models"])
async def one_model(request: Request, name: str) -> Response:
    """One served model."""
    return json_response(_card(state_of(request).require_model(name), name))


def _card(model: ServedModel, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "thinfer",
        "max_model_len": model.context,
    }


@router.post("/tokenize", responses={200: {"model": Tokens}, **FAILURES}, tags=["tokens"])
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of a conversation as the model's template writes it."""
    model = state_of(request).require_model(body.model)
    return json_response(await asyncio.to_thread(_tokens, model, body))


def _tokens(model: ServedModel, body: TokenizeRequest) -> dict[str, object]:
    tokenizer = model.llm.tokenizer
    if body.messages is not None:
        generation = body.add_generation_prompt
        ids = prompt_ids(model, body.messages, tools=[], add_generation_prompt=generation, variables={})
    else:
        ids = tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens, parse_special=True)
    spelled = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    return {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": model.context,
        "token_strs": spelled if body.return_token_strs else None,
    }


@router.post("/detokenize", responses={200: {"model": Text}, **FAILURES}, tags=["tokens"])
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, control tokens spelled out."""
    model = state_of(request).require_model(body.model)
    model.check_ids(body.tokens, "tokens")
    return json_response({"prompt": model.llm.tokenizer.decode(body.tokens, skip_special=False)})


@router.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}, **FAILURES}, tags=["tokens"])
async def tokenizer_info(request: Request) -> Response:
    """Names of the special tokens and the chat template, for evaluation tools."""
    model = state_of(request).require_model()
    named = model.llm.tokenizer.named_tokens
    try:
        template = model.llm.chat_template.source
    except UnsupportedError:
        template = None
    names = {name: named.get(name) for name in ("eos_token", "bos_token", "pad_token")}
    return json_response({**names, "chat_template": template, "max_model_len": model.context})


@router.post("/v1/embeddings", include_in_schema=False)
async def embeddings(request: Request) -> Response:
    """Not there yet."""
    raise ApiError(501, "embeddings are not implemented; thinfer serves text generation")
