"""Servers over an engine that computes nothing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from prefold.server.app import make_app
from prefold.server.settings import ServerSettings


def _fake_engine_module() -> Any:
    """Tests are no package, so what they share is loaded by its file."""
    name = "prefold_fake_engine"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fake_engine.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def fake() -> Any:
    """The module `fake_engine`."""
    return _fake_engine_module()


@pytest.fixture
async def engine(fake: Any) -> Any:
    return fake.FakeEngine()


@pytest.fixture
def make_client(engine: Any) -> Callable[..., httpx.AsyncClient]:
    """A client of an app over `engine` (or another) with the given settings."""

    def make(over: Any = engine, /, **settings: Any) -> httpx.AsyncClient:
        app = make_app(over, ServerSettings(**({"served_model_names": ("fake", "alias")} | settings)))
        transport = httpx.ASGITransport(app)
        return httpx.AsyncClient(transport=transport, base_url="http://server")

    return make


@pytest.fixture
async def client(make_client: Callable[..., httpx.AsyncClient]) -> Any:
    async with make_client() as client:
        yield client
