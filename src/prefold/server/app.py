"""The FastAPI app: routers, middleware and errors put together."""

from __future__ import annotations

from importlib import metadata

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from prefold.engine.async_engine import AsyncLLM
from prefold.server.chat import chat_router
from prefold.server.completions import completions_router
from prefold.server.dashboard import dashboard_router
from prefold.server.errors import add_error_handlers
from prefold.server.explain import explain_router
from prefold.server.gate import Gate
from prefold.server.metrics import RequestRecorder, metrics_router
from prefold.server.settings import ServerSettings
from prefold.server.state import ServerState
from prefold.server.utility import utility_router

DESCRIPTION = (
    """OpenAI's API, with vLLM's additions, over an engine for long prompts. Errors have OpenAI's form."""
)


def make_app(engine: AsyncLLM | None, settings: ServerSettings) -> FastAPI:
    """The app over an engine; `app.state.server` is its `ServerState`.

    Args:
        engine: None while it loads; put it into `app.state.server.engine` later. Until then requests get 503.
    """
    app = FastAPI(
        title="Prefold",
        version=metadata.version("prefold"),
        description=DESCRIPTION,
        docs_url=None,  # these pages would load their scripts from elsewhere
        redoc_url=None,
        # Web pages can send other types to any address without asking: CORS would not hold them back.
        strict_content_type=True,
    )
    state = app.state.server = ServerState(engine, settings)
    recorder = state.recorder = RequestRecorder()
    add_error_handlers(app)
    app.include_router(completions_router())
    app.include_router(chat_router())
    app.include_router(utility_router())
    app.include_router(explain_router(state.loaded_engine))
    app.include_router(metrics_router(lambda: state.engine, recorder, settings.model_name))
    app.include_router(dashboard_router(state.loaded_engine, recorder, settings.model_name))
    app.add_middleware(Gate, state=state)
    if settings.allow_origins:
        # The outermost: errors carry its headers too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app
