"""Listens, loads the engine, serves until a signal or the engine's end, and leaves in order."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from prefold.config import EngineConfig
from prefold.engine.async_engine import AsyncLLM
from prefold.server.app import make_app
from prefold.server.certificates import check_certificates
from prefold.server.settings import ServerSettings
from prefold.server.state import ServerState

if TYPE_CHECKING:
    from prefold.server.otel import RequestTracer

logger = logging.getLogger("prefold")

FAREWELL_S = 5.0
"""For the last bytes of responses, once the engine is done with them."""


@dataclass(frozen=True)
class ListenOptions:
    """Where and how the server listens.

    Attributes:
        port: 0 is any that is free.
        ssl_keyfile, ssl_certfile: of the server; both give https.
        ssl_ca_certs: clients show certificates that one of these has signed.
        ssl_cert_reqs: 0 they need not, 1 only if they like, 2 they must: the default with `ssl_ca_certs`.
        timeout_keep_alive: seconds until an idle connection is closed.
        root_path: the path under which a proxy shows this server.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int | None = None
    timeout_keep_alive: int = 5
    root_path: str = ""


def serve(
    start: Coroutine[Any, Any, AsyncLLM],
    settings: ServerSettings,
    listen: ListenOptions,
    tracer: RequestTracer | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or the engine's end. Returns the exit code: 0, or 1 for a dead engine.

    Args:
        start: starts the engine; it is awaited when the port has been bound.
        tracer: makes a span of every request.

    Raises:
        OSError: the address cannot be listened on.
        ValueError: the engine cannot be started with these options, or a certificate cannot be used.
    """
    try:
        app = make_app(None, settings)
        app.state.server.tracer = tracer
        server = _Server(_uvicorn_config(app, listen))
        bound = _bind(listen.host, listen.port)
    except BaseException:
        start.close()
        raise
    scheme = "https" if listen.ssl_certfile else "http"
    url = f"{scheme}://{_host_port(listen.host, bound.getsockname()[1])}{listen.root_path}"
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        return runner.run(_run(start, server, bound, app.state.server, url))


def _uvicorn_config(app: Any, listen: ListenOptions) -> uvicorn.Config:
    if (listen.ssl_keyfile is None) != (listen.ssl_certfile is None):
        raise ValueError("--ssl-keyfile and --ssl-certfile belong together: give both or neither")
    if listen.ssl_ca_certs is not None and listen.ssl_certfile is None:
        raise ValueError("--ssl-ca-certs takes --ssl-keyfile and --ssl-certfile")
    if listen.ssl_cert_reqs and listen.ssl_ca_certs is None:
        raise ValueError(f"--ssl-cert-reqs {listen.ssl_cert_reqs} takes --ssl-ca-certs")
    if listen.ssl_keyfile is not None and listen.ssl_certfile is not None:
        check_certificates(listen.ssl_keyfile, listen.ssl_certfile, listen.ssl_ca_certs)
    cert_reqs = listen.ssl_cert_reqs
    if cert_reqs is None:
        cert_reqs = 0 if listen.ssl_ca_certs is None else 2
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=listen.timeout_keep_alive,
        timeout_graceful_shutdown=int(FAREWELL_S),
        ssl_keyfile=listen.ssl_keyfile,
        ssl_certfile=listen.ssl_certfile,
        ssl_ca_certs=listen.ssl_ca_certs,
        ssl_cert_reqs=cert_reqs,
        root_path=listen.root_path,
    )
    config.load()  # reads the certificates
    return config


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens. OSError says where it could not."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(2048)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {_host_port(host, port)}: {error.strerror}") from None
    return bound


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Server(uvicorn.Server):
    """Signals ask for a drain, during which the sockets stay open; a second one ends it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.asked_to_stop = asyncio.Event()
        self.asked_to_hurry = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        if self.asked_to_stop.is_set():
            self.asked_to_hurry.set()
        self.asked_to_stop.set()


async def _run(
    start: Coroutine[Any, Any, AsyncLLM], server: _Server, bound: socket.socket, state: ServerState, url: str
) -> int:
    server.loop = asyncio.get_running_loop()
    _say(f"Listening on {url}, loading the model ...")
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    loading = asyncio.create_task(start)
    stop = asyncio.create_task(server.asked_to_stop.wait())
    try:
        await _first_of(loading, stop, serving)
        if not loading.done():
            return 0
        engine = state.engine = loading.result()
        _say(_banner(url, engine.config, state.settings, engine.tokenizer is not None))
        return await _serve_engine(engine, server, state, stop)
    finally:
        state.draining = True
        await _end(loading, stop)
        server.should_exit = True
        if server.asked_to_hurry.is_set():
            server.force_exit = True
            for task in server.server_state.tasks:
                task.cancel()
        await serving
        if state.engine is not None:
            await state.engine.shutdown()


async def _serve_engine(
    engine: AsyncLLM, server: _Server, state: ServerState, stop: asyncio.Task[Any]
) -> int:
    """Until the engine is dead (1), or running requests have ended after a signal (0)."""
    dead = asyncio.create_task(engine.wait_dead())
    hurry = asyncio.create_task(server.asked_to_hurry.wait())
    drain: asyncio.Task[None] | None = None
    try:
        await _first_of(dead, stop)
        state.draining = True
        if not dead.done():
            limit = state.settings.drain_timeout_s
            _say(f"Shutting down: running requests have {limit:g} s (again: at once)")
            drain = asyncio.create_task(engine.drain(limit))
            await _first_of(dead, hurry, drain)
        # What clients are still to be told.
        idle = asyncio.create_task(state.idle.wait())
        await asyncio.wait((idle, hurry), timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        await _end(idle)
        if dead.done() and not stop.done():
            logger.error("the engine has failed: %s", dead.result())
            return 1
        return 0
    finally:
        await _end(dead, hurry, *([] if drain is None else [drain]))


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would complain


def _say(text: str) -> None:
    print(text, flush=True)


def _banner(url: str, config: EngineConfig, settings: ServerSettings, takes_text: bool) -> str:
    """What a user needs to know, and a command to try."""
    prompt = "Once upon a time" if takes_text else [1, 2, 3]
    body = json.dumps({"model": settings.model_name, "prompt": prompt, "max_tokens": 32})
    key = ' -H "Authorization: Bearer KEY"' if settings.api_keys else ""
    defaults = settings.defaults.describe() if settings.defaults else ""
    lines = [
        f"Serving {settings.model_name} at {url}",
        f"  layout         {describe_layout(config)}",
        f"  max_model_len  {config.scheduler.max_model_len} tokens, prompt and output together",
    ]
    if defaults:
        lines.append(f"  defaults       {defaults} (of generation_config.json)")
    lines.append(f"  try            curl {url}/v1/completions{key} --json {shlex.quote(body)}")
    return "\n".join(lines)


def describe_layout(config: EngineConfig) -> str:
    """For example `4 ranks (DP 1 x PP 1 x PCP 2 x TP 2), DCP 2, 1 thread each, float32`."""
    p, runtime = config.parallel, config.runtime
    axes = (
        f"DP {p.data_parallel_size} x PP {p.pipeline_parallel_size} x "
        f"PCP {p.prefill_context_parallel_size} x TP {p.tensor_parallel_size}"
    )
    parts = [
        f"{_count(p.world_size, 'rank')} ({axes})",
        f"DCP {p.decode_context_parallel_size}",
        *(["EP"] if p.enable_expert_parallel else []),
        f"{_count(runtime.threads_per_rank, 'thread')} each",
        config.model.dtype,
    ]
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
