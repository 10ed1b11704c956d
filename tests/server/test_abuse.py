"""Bodies that follow the served OpenAPI schema, break it, or are no JSON at all: no 500, and errors in form.

The requests for engine state (/metrics, /v1/explain, /dashboard) take no body and have tests of their own.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from prefold.server.app import make_app
from prefold.server.settings import ServerSettings

schemathesis = pytest.importorskip("schemathesis")

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
FEW = settings(
    max_examples=12,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


@pytest.fixture(scope="module")
def schema(fake: Any) -> Any:
    app = make_app(fake.FakeEngine(), ServerSettings(("fake", "alias")))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_the_schema(schema: Any, path: str, mode: Any):
    """Status, type and form of every answer are documented ones, and wrong bodies are refused.

    A body that follows the schema may be refused: some fields exclude each other.
    """
    from schemathesis.checks import load_all_checks
    from schemathesis.specs.openapi.checks import positive_data_acceptance, response_schema_conformance

    load_all_checks()
    seen: list[int] = []

    @FEW
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call()
        excluded = [positive_data_acceptance]
        if "event-stream" in response.headers["content-type"][0]:
            excluded.append(response_schema_conformance)  # it wants an object per event
        case.validate_response(response, excluded_checks=excluded)
        seen.append(response.status_code)

    ask()
    assert len(seen) >= 5
    assert set(seen) <= {200, 400, 404}


VALID = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1.5}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "top_p": 0.5},
    "/tokenize": {"prompt": "abc", "return_token_strs": True},
    "/detokenize": {"tokens": [97, 98]},
}
PIECES = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [
            b"\xff",
            b"\xed\xa0\x80",
            b"\\ud800",
            b'"',
            b"[" * 2000,
            b'{"a":' * 2000,
            b"NaN",
            b"-1",
            b"1e999",
            b"\x00",
        ]
        + [b"-Infinity", b"9" * 5000, b"null", b'"stop":["a"' + b',"a"' * 5000 + b"],", b",", b"0.1", b"true"]
    ),
)


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS)
@settings(FEW, max_examples=100)
@given(cut=st.tuples(st.floats(0, 1), st.integers(0, 8)), piece=PIECES)
async def test_spoilt_bytes(client: httpx.AsyncClient, path: str, cut: tuple[float, int], piece: bytes):
    """A valid body in which some bytes are replaced."""
    body = json.dumps(VALID[path]).encode()
    start = int(cut[0] * len(body))
    spoilt = body[:start] + piece + body[start + cut[1] :]
    response = await client.post(path, content=spoilt, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (spoilt[:200], response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        assert len(response.content) < 3000
