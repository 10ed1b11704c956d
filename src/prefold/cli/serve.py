"""`prefold serve`: OpenAI's API over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from prefold.checkpoint_files import find_checkpoint
from prefold.cli.nodes import join_torchrun, run_as_node, runs_engine
from prefold.cli.options import EngineOptions, Flag, number, text

if TYPE_CHECKING:
    from prefold.server.otel import RequestTracer


@dataclass(frozen=True)
class ServeArgs:
    """Serve a model over HTTP, as OpenAI's API does.

    Point any client of that API at http://HOST:PORT/v1. The port is taken before the model loads; /ready
    answers 200 once requests are taken, /health as long as every worker answers. SIGTERM or Ctrl-C lets
    running requests finish. docs/serving.md lists endpoints, parameters and errors.

    Attributes:
        model: Folder of a Hugging Face checkpoint, or a GGUF file.
        host: Address to listen on. 0.0.0.0 is every network of this machine.
        port: 0 takes any that is free; the address is printed.
        served_model_name: Name of the model in requests and responses; may be given several times.
        api_key: Requests must bring this key as a bearer token; any of them if given several times.
        api_key_file: File with such keys, one a line.
        allow_origin: Let web pages from this origin ask (CORS), such as https://example.org, or * for all.
        ssl_keyfile: Private key, for https.
        ssl_certfile: Certificate, for https.
        ssl_ca_certs: Clients must show a certificate that one of these has signed.
        ssl_cert_reqs: Whether they must: 0 no, 1 only if they like, 2 yes.
        chat_template: Jinja template for chats, instead of the checkpoint's.
        tool_call_parser: How the model writes tool calls. auto is what its chat template shows, none leaves
            them in the text.
        generation_config: auto takes the sampling defaults of the checkpoint's generation_config.json, none
            OpenAI's: temperature 1 and nothing left out.
        max_waiting: Requests that may wait for a place; further ones get status 429.
        restart_workers: Start the workers anew after one has died, rather than exit with code 1.
        max_body_mb: Longest body of a request, in MiB.
        request_timeout: Seconds until a request that is not done is ended with status 504.
        timeout_keep_alive: Seconds until an idle connection is closed.
        drain_timeout: Seconds that running requests have after SIGTERM.
        root_path: Path under which a proxy shows the server.
        log_requests: Print a line per request.
        otlp_traces_endpoint: Send a span of every request to this collector (OpenTelemetry, over HTTP), such
            as http://localhost:4318. Needs prefold[otel].
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, number()] = 8000
    served_model_name: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    api_key: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY")] = ()
    api_key_file: Annotated[str | None, text("FILE")] = None
    allow_origin: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ORIGIN")] = ()
    ssl_keyfile: Annotated[str | None, text("FILE")] = None
    ssl_certfile: Annotated[str | None, text("FILE")] = None
    ssl_ca_certs: Annotated[str | None, text("FILE")] = None
    ssl_cert_reqs: Annotated[
        Literal[0, 1, 2] | None, arg(help_behavior_hint="(default: 2 with --ssl-ca-certs)")
    ] = None
    chat_template: Annotated[str | None, text("FILE")] = None
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "deepseek_v3", "glm"] = (
        "auto"
    )
    generation_config: Literal["auto", "none"] = "auto"
    max_waiting: Annotated[int, number()] = 1024
    restart_workers: Flag = False
    max_body_mb: Annotated[float, arg(metavar="N")] = 32.0
    request_timeout: Annotated[float | None, arg(metavar="S", help_behavior_hint="(default: none)")] = None
    timeout_keep_alive: Annotated[int, arg(metavar="S")] = 5
    drain_timeout: Annotated[float, arg(metavar="S")] = 60.0
    root_path: Annotated[str, text("PATH")] = ""
    log_requests: Flag = False
    otlp_traces_endpoint: Annotated[str | None, text("URL")] = None
    engine: EngineOptions = field(default_factory=EngineOptions)


def run(args: ServeArgs) -> int:
    folder = find_checkpoint(args.model)
    engine_options = join_torchrun(args.engine)
    options = engine_options.for_llm()
    if not runs_engine(engine_options):
        return run_as_node({"model": args.model, **options})

    from prefold.engine.args import EngineArgs
    from prefold.engine.async_engine import AsyncLLM
    from prefold.server.launch import ListenOptions, serve
    from prefold.server.settings import MIB, ServerSettings, read_sampling_defaults

    _check(args)
    settings = ServerSettings(
        served_model_names=args.served_model_name
        or tuple(dict.fromkeys((folder.resolve().name, args.model))),
        api_keys=_api_keys(args),
        allow_origins=args.allow_origin,
        max_body_bytes=int(args.max_body_mb * MIB),
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        chat_template=None if args.chat_template is None else _read("--chat-template", args.chat_template),
        tool_call_parser=args.tool_call_parser,
        defaults=read_sampling_defaults(folder) if args.generation_config == "auto" else None,
        log_requests=args.log_requests,
    )
    listen = ListenOptions(
        host=args.host,
        port=args.port,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        timeout_keep_alive=args.timeout_keep_alive,
        root_path=args.root_path.rstrip("/"),
    )
    tracer = None if args.otlp_traces_endpoint is None else _tracer(args.otlp_traces_endpoint)
    start = AsyncLLM.start(
        EngineArgs(args.model, **options),
        max_waiting=args.max_waiting,
        restart_workers=args.restart_workers,
    )
    try:
        return serve(start, settings, listen, tracer)
    finally:
        if tracer is not None:
            tracer.shutdown()


def _tracer(endpoint: str) -> RequestTracer:
    """ValueError: it is no URL, or what sends spans is not installed."""
    try:
        from prefold.server.otel import RequestTracer
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs OpenTelemetry (there is no {error.name}): "
            f"pip install 'prefold[otel]'"
        ) from None
    return RequestTracer.to_collector(endpoint)


def _check(args: ServeArgs) -> None:
    """ValueError for a value out of its range."""
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port} is outside [0, 65535]")
    for name in ("max_waiting", "timeout_keep_alive"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for name in ("max_body_mb", "request_timeout", "drain_timeout"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value} must be a finite number above 0")


def _api_keys(args: ServeArgs) -> tuple[str, ...]:
    keys = list(args.api_key)
    if args.api_key_file is not None:
        lines = _read("--api-key-file", args.api_key_file).splitlines()
        in_file = [line.strip() for line in lines if line.strip()]
        if not in_file:
            raise ValueError(f"--api-key-file {args.api_key_file} holds no key")
        keys += in_file
    if any(not key.strip() for key in keys):
        raise ValueError("an API key is empty")
    return tuple(keys)


def _read(option: str, file: str) -> str:
    """A file's text. ValueError names it if it cannot be read."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{option} {file} is no text in UTF-8") from None
