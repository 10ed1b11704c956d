"""From the first message to the exit code, over the fake engine: uvicorn and sockets are real."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from prefold.server.app import make_app
from prefold.server.certificates import check_certificates
from prefold.server.launch import ListenOptions, _banner, _bind, _run, _Server, _uvicorn_config, serve
from prefold.server.settings import SamplingDefaults, ServerSettings, read_sampling_defaults

pytestmark = pytest.mark.anyio

BODY = {"prompt": "abc", "max_tokens": 2}


class Running:
    """A server that runs in this event loop."""

    def __init__(self, start: Any, listen: ListenOptions, **settings: Any) -> None:
        app = make_app(None, ServerSettings(("fake",), **settings))
        self.server = _Server(_uvicorn_config(app, listen))
        bound = _bind(listen.host, listen.port)
        self.port = bound.getsockname()[1]
        scheme = "http" if listen.ssl_certfile is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.exit_code = asyncio.create_task(_run(start, self.server, bound, app.state.server, self.url))

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)


@asynccontextmanager
async def running(
    start: Any,
    listen: ListenOptions = ListenOptions(port=0),  # noqa: B008 (frozen)
    trust: ssl.SSLContext | bool = True,
    **settings: Any,
) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    server = Running(start, listen, **settings)
    try:
        async with httpx.AsyncClient(base_url=server.url, verify=trust) as client:
            async with asyncio.timeout(5):
                while not server.server.started:
                    await asyncio.sleep(0.005)
            yield server, client
    finally:
        server.signal()
        server.signal()
        await asyncio.wait([server.exit_code])


async def ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(5):
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.005)


async def started(engine: Any) -> Any:
    return engine


async def test_it_answers_while_the_model_loads(engine: Any, capsys: pytest.CaptureFixture[str]):
    loaded = asyncio.Event()

    async def start() -> Any:
        await loaded.wait()
        return engine

    engine.config.parallel = None  # the message is another test's
    async with running(start()) as (server, client):
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert (response.status_code, "loading" in response.text) == (503, True)
        server.signal()
        assert await server.exit_code == 0
    assert f"Listening on {server.url}" in capsys.readouterr().out


async def test_a_model_that_cannot_be_loaded(engine: Any):
    async def start() -> Any:
        await asyncio.sleep(0.02)
        raise ValueError("max_model_len=5 is too little")

    async with running(start()) as (server, client):
        with pytest.raises(ValueError, match="max_model_len=5"):
            await asyncio.wait_for(server.exit_code, 5)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_running_requests_end_and_new_ones_are_refused(serving_engine: Any):
    engine = serving_engine
    async with running(started(engine)) as (server, client):
        await ready(client)
        engine.gate.clear()
        whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
        streamed = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": True}))
        while len(engine.running) < 2:
            await asyncio.sleep(0.005)
        server.signal()
        await asyncio.sleep(0.02)
        async with httpx.AsyncClient(base_url=server.url) as other:
            response = await other.post("/v1/completions", json=BODY)
            assert (response.status_code, "shutting down" in response.text) == (503, True)
            assert (await other.get("/ready")).status_code == 503
            assert (await other.get("/health")).status_code == 200
        assert not server.exit_code.done()
        engine.gate.set()
        assert (await whole).json()["choices"][0]["text"] == "ab"
        assert (await streamed).text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(server.exit_code, 5) == 0
    assert engine.is_shut_down
    assert not engine.aborted


@pytest.mark.parametrize("hurry", [False, True])
async def test_what_does_not_end_in_time_is_ended(serving_engine: Any, hurry: bool):
    engine = serving_engine
    async with running(started(engine), drain_timeout_s=60 if hurry else 0.05) as (server, client):
        await ready(client)
        engine.gate.clear()
        request = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not engine.running:
            await asyncio.sleep(0.005)
        server.signal()
        if hurry:
            await asyncio.sleep(0.02)
            server.signal()
            with pytest.raises(httpx.HTTPError):
                (await asyncio.wait_for(request, 10)).raise_for_status()
        else:
            assert (await asyncio.wait_for(request, 5)).status_code == 503
        assert await asyncio.wait_for(server.exit_code, 10) == 0
    assert not engine.running


async def test_a_dead_engine_ends_the_server(serving_engine: Any, caplog: pytest.LogCaptureFixture):
    engine = serving_engine
    async with running(started(engine)) as (server, client):
        await ready(client)
        engine.gate.clear()
        body = {**BODY, "max_tokens": 9, "stream": True}
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        while not engine.running:
            await asyncio.sleep(0.005)
        with caplog.at_level(logging.ERROR):
            engine.failure = "rank 1 has died"
            engine.dead.set()
            engine.gate.set()
            assert await asyncio.wait_for(server.exit_code, 5) == 1
        assert "rank 1 has died" in (await request).text
    assert "rank 1 has died" in caplog.text


@pytest.fixture
def serving_engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("prefold.server.launch._banner", lambda *_: "")
    return engine


@pytest.mark.parametrize(("takes_text", "prompt"), [(True, '"Once upon a time"'), (False, "[1, 2, 3]")])
def test_the_command_to_try_works_without_a_tokenizer(
    takes_text: bool, prompt: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("prefold.server.launch.describe_layout", lambda _: "1 rank")
    config: Any = SimpleNamespace(scheduler=SimpleNamespace(max_model_len=99))
    banner = _banner("http://here", config, ServerSettings(("m",)), takes_text)
    assert f'\'{{"model": "m", "prompt": {prompt}, "max_tokens": 32}}\'' in banner


def test_a_port_in_use_is_said_before_anything_is_loaded():
    async def start() -> Any:
        raise AssertionError("the model was loaded")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            serve(start(), ServerSettings(("fake",)), ListenOptions(port=port))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_keyfile": "key"}, "belong together"),
        ({"ssl_certfile": "cert"}, "belong together"),
        ({"ssl_ca_certs": "ca"}, "--ssl-ca-certs takes"),
        (
            {"ssl_keyfile": "no-such", "ssl_certfile": "no-such"},
            "--ssl-certfile no-such cannot be read: No such",
        ),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs 2 takes --ssl-ca-certs"),
        ({"host": "no-such-host.invalid"}, "cannot listen on no-such-host.invalid:8000"),
    ],
)
def test_where_it_cannot_listen(options: dict[str, Any], words: str):
    async def start() -> Any:
        raise AssertionError("the model was loaded")

    with pytest.raises((ValueError, OSError), match=re.escape(words)):
        serve(start(), ServerSettings(("fake",)), ListenOptions(**options))


class Certificates(NamedTuple):
    """Files of an authority, a server and a client that it has signed, and of a stranger."""

    ca: trustme.CA
    ca_file: str
    server: tuple[str, str]
    encrypted: str
    client: trustme.LeafCert
    stranger: tuple[str, str]

    def trust(self, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if client is not None:
            client.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder, ca = tmp_path_factory.mktemp("certificates"), trustme.CA()

    def files(name: str, authority: trustme.CA) -> tuple[str, str]:
        leaf, paths = authority.issue_cert("127.0.0.1"), (folder / f"{name}.key", folder / f"{name}.pem")
        leaf.private_key_pem.write_to_path(paths[0])
        leaf.cert_chain_pems[0].write_to_path(paths[1])
        return str(paths[0]), str(paths[1])

    server, encrypted = files("server", ca), folder / "encrypted.key"
    key = serialization.load_pem_private_key(Path(server[0]).read_bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    encrypted.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))
    ca.cert_pem.write_to_path(folder / "ca.pem")
    return Certificates(
        ca,
        str(folder / "ca.pem"),
        server,
        str(encrypted),
        ca.issue_cert("client@example.org"),
        files("stranger", trustme.CA()),
    )


@pytest.mark.parametrize("wants", [0, 1, 2, None])
async def test_https(certificates: Certificates, wants: int | None):
    """Who checks the certificate is served, who speaks plain HTTP or does not know the authority is not.
    Certificates of clients are asked for (1), or demanded (2, or by default if there are authorities)."""
    key, cert = certificates.server
    ca_file = None if wants == 0 else certificates.ca_file
    listen = ListenOptions(
        port=0, ssl_keyfile=key, ssl_certfile=cert, ssl_ca_certs=ca_file, ssl_cert_reqs=wants
    )
    demanded = wants in (None, 2)
    trust = certificates.trust(certificates.client)
    async with running(asyncio.Event().wait(), listen, trust) as (server, client):
        for _ in range(2):  # the second time over the same connection
            assert (await client.get("/version")).status_code == 200
        plain = server.url.replace("https", "http")
        for url, other in ((plain, True), (server.url, True), (server.url, certificates.trust())):
            async with httpx.AsyncClient(base_url=url, verify=other) as stranger:
                if isinstance(other, ssl.SSLContext) and not demanded:
                    assert (await stranger.get("/version")).status_code == 200
                    continue
                with pytest.raises(httpx.TransportError):
                    await stranger.get("/version")


def test_certificates_that_cannot_be_used(certificates: Certificates):
    (key, cert), (other_key, _) = certificates.server, certificates.stranger
    wrong = {
        (cert, cert, None): f"--ssl-keyfile {cert} holds no private key",
        (key, key, None): f"--ssl-certfile {key} holds no certificate",
        (key, cert, key): f"--ssl-ca-certs {key} holds no certificate",
        (other_key, cert, None): f"--ssl-keyfile {other_key} is not the key of --ssl-certfile {cert}",
        (certificates.encrypted, cert, None): f"--ssl-keyfile {certificates.encrypted} is encrypted",
        (key + "x", cert, None): f"--ssl-keyfile {key}x cannot be read: No such file",
    }
    for files, words in wrong.items():
        with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
            check_certificates(*files)
    check_certificates(key, cert, certificates.ca_file)


def test_sampling_defaults_of_a_checkpoint(tmp_path: Any):
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": 2, "do_sample": true}')
    defaults = read_sampling_defaults(tmp_path)
    assert defaults == SamplingDefaults(temperature=0.6, top_k=20)
    assert defaults.describe() == "temperature=0.6, top_k=20"
    for broken in ("[]", "{", '{"temperature": "hot"}'):
        file.write_text(broken)
        with pytest.raises(ValueError, match="--generation-config none"):
            read_sampling_defaults(tmp_path)


async def test_defaults_hold_where_a_request_says_nothing(make_client: Any, engine: Any):
    defaults = SamplingDefaults(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    async with make_client(defaults=defaults) as client:
        await client.post("/v1/completions", json=BODY)
        chosen = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
        await client.post("/v1/completions", json={**BODY, **chosen})
    of_checkpoint, of_request = engine.params
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    assert [getattr(of_checkpoint, name) for name in fields] == [0.5, 3, 0.9, 0.1, 1.1]
    assert [getattr(of_request, name) for name in fields] == [0, 0, 1, 0, 1]
