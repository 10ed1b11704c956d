"""Models, tokenisation, health and version."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter, Request, Response

from prefold.engine.errors import EngineDeadError
from prefold.server.body import JSONRoute, answer, error_responses
from prefold.server.errors import unavailable
from prefold.server.progress import token_text
from prefold.server.prompts import encode, encode_chat
from prefold.server.protocol import DetokenizeRequest, TokenizeRequest, TokenizeTextRequest
from prefold.server.responses import ModelCard, ModelList, Status, Text, Tokens, Version
from prefold.server.state import ServerState, state_of


def utility_router() -> APIRouter:
    router = APIRouter(route_class=JSONRoute)
    router.get(
        "/v1/models",
        response_model=ModelList,
        responses=error_responses(),
        summary="Names that requests may use",
    )(list_models)
    router.get(
        "/v1/models/{model_id:path}",
        response_model=ModelCard,
        responses=error_responses(),
        summary="One of them",
    )(get_model)
    router.post(
        "/tokenize",
        response_model=Tokens,
        responses=error_responses(),
        summary="Text or a conversation to token ids",
    )(tokenize)
    router.post("/detokenize", response_model=Text, responses=error_responses(), summary="Token ids to text")(
        detokenize
    )
    router.get(
        "/health", response_model=Status, responses=error_responses(), summary="200 if every worker answers"
    )(health)
    router.get(
        "/ready", response_model=Status, responses=error_responses(), summary="200 if requests are taken"
    )(ready)
    router.get("/version", response_model=Version, responses=error_responses(), summary="Prefold's version")(
        version
    )
    return router


async def list_models(request: Request) -> Response:
    state = state_of(request)
    return answer(ModelList(object="list", data=[_card(state, n) for n in state.settings.served_model_names]))


async def get_model(model_id: str, request: Request) -> Response:
    state = state_of(request)
    state.check_model(model_id)
    return answer(_card(state, model_id))


def _card(state: ServerState, name: str) -> ModelCard:
    config = state.loaded_engine().config
    return ModelCard(
        id=name,
        object="model",
        created=state.created,
        owned_by="prefold",
        root=config.model.path,
        parent=None,
        max_model_len=config.scheduler.max_model_len,
    )


async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    state = state_of(request)
    engine = state.loaded_engine()
    state.check_model(body.model)
    if isinstance(body, TokenizeTextRequest):
        token_ids = await encode(engine, body.prompt, body.add_special_tokens)
    else:
        _, token_ids = await encode_chat(engine, body, state.settings, body.add_special_tokens)
    of = token_text(engine)
    return answer(
        Tokens(
            count=len(token_ids),
            max_model_len=engine.config.scheduler.max_model_len,
            tokens=token_ids,
            token_strs=[of(token_id) for token_id in token_ids] if body.return_token_strs else None,
        )
    )


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    state = state_of(request)
    engine = state.loaded_engine()
    state.check_model(body.model)
    if engine.tokenizer is None:
        return answer(Text(prompt=""))
    return answer(Text(prompt=await engine.decode(body.tokens, skip_special_tokens=False)))


async def health(request: Request) -> Response:
    engine = state_of(request).loaded_engine()
    try:
        await engine.check_health()
    except EngineDeadError as error:
        raise unavailable(str(error)) from error
    return answer(Status(status="ok"))


async def ready(request: Request) -> Response:
    state_of(request).serving_engine()
    return answer(Status(status="ready"))


async def version() -> Response:
    return answer(Version(version=metadata.version("prefold")))
