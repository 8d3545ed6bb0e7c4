"""Which pages and which Host headers are let in."""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.responses import PlainTextResponse

from headrace.config import Settings
from headrace.server.app import create_app
from headrace.server.models import Models
from headrace.server.origins import OriginGuard

pytestmark = pytest.mark.anyio

GOOD_ORIGINS = [
    "http://localhost",
    "http://localhost:3000",
    "https://127.0.0.1:8443",
    "http://0.0.0.0",
    "app://obsidian.md",
    "file://",
    "tauri://localhost",
    "vscode-webview://abc",
    "chrome-extension://abcdef",
]
BAD_ORIGINS = [
    "http://evil.example",
    "https://localhost.evil.example",
    "http://evil.example/?http://localhost",
    "null",
    "",
]


@pytest.mark.parametrize("origin", GOOD_ORIGINS)
async def test_local_origin_is_allowed_by_name(client: httpx.AsyncClient, origin: str) -> None:
    answer = await client.get("/api/tags", headers={"origin": origin})
    # The client's own Host is localhost: the same origin needs no header.
    is_same = origin == "http://localhost"
    assert answer.status_code == 200
    assert answer.headers.get("access-control-allow-origin") == (None if is_same else origin)
    assert ("Origin" in answer.headers.get("vary", "")) == (not is_same)


@pytest.mark.parametrize("origin", BAD_ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_foreign_origin_gets_an_empty_403(
    client: httpx.AsyncClient, origin: str, method: str
) -> None:
    answer = await client.request(method, "/api/generate", headers={"origin": origin})
    assert (answer.status_code, answer.content) == (403, b"")
    assert "access-control-allow-origin" not in answer.headers


async def test_errors_and_streams_carry_the_allowed_origin(client: httpx.AsyncClient) -> None:
    origin = {"origin": "http://localhost:1"}
    bodies = {"": 400, '{"model":"m","prompt":"x"}': 200}
    for body, status in bodies.items():
        answer = await client.post("/api/generate", content=body, headers=origin)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "http://localhost:1"


async def test_preflight_lists_methods_and_headers(client: httpx.AsyncClient) -> None:
    headers = {"origin": "http://localhost:5174", "access-control-request-method": "POST"}
    answer = await client.options("/api/chat", headers=headers)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "http://localhost:5174"
    assert answer.headers["access-control-allow-methods"] == (
        "GET,POST,PUT,PATCH,DELETE,HEAD,OPTIONS"
    )
    assert answer.headers["access-control-max-age"] == "43200"
    allowed = answer.headers["access-control-allow-headers"].lower().split(", ")
    assert {"authorization", "content-type", "openai-beta", "x-stainless-helper-method"} <= set(
        allowed
    )
    assert "access-control-allow-credentials" not in answer.headers


async def test_setting_adds_origins_to_the_default_ones(models: Models) -> None:
    app = create_app(Settings(origins=("http://*.example",)), models)
    async with _client(app) as client:
        for origin in ("http://a.example", "http://localhost:1"):
            answer = await client.get("/", headers={"origin": origin})
            assert answer.headers["access-control-allow-origin"] == origin
        assert (await client.get("/", headers={"origin": "http://a.evil"})).status_code == 403


async def test_star_allows_every_origin(models: Models) -> None:
    async with _client(create_app(Settings(origins=("*",)), models)) as client:
        answer = await client.get("/", headers={"origin": "http://evil.example"})
    assert answer.headers["access-control-allow-origin"] == "*"


GOOD_HOSTS = [
    "localhost",
    "localhost:11434",
    "LOCALHOST",
    "127.0.0.1:11434",
    "[::1]:11434",
    "::1",
    "10.1.2.3",
    "192.168.1.9:11434",
    "0.0.0.0",
    "mybox.local",
    "host.docker.internal",
    "a.localhost",
    ":11434",
    "",
    socket.gethostname(),
]
BAD_HOSTS = ["evil.example", "evil.example:11434", "localhost.evil.example", "8.8.8.8", "[2600::1]"]


@pytest.mark.parametrize("host", GOOD_HOSTS)
async def test_loopback_bind_serves_hosts_of_this_machine(
    client: httpx.AsyncClient, host: str
) -> None:
    assert (await client.get("/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", BAD_HOSTS)
@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
async def test_loopback_bind_refuses_foreign_hosts(
    client: httpx.AsyncClient, host: str, method: str
) -> None:
    answer = await client.request(method, "/", headers={"host": host})
    assert (answer.status_code, answer.content) == (403, b"")


@pytest.mark.parametrize("bound", ["0.0.0.0", "192.168.1.9", "::"])
async def test_public_bind_serves_every_host(bound: str) -> None:
    app = OriginGuard(PlainTextResponse("ok"), bound_host=bound)
    async with _client(app) as client:
        answer = await client.get("/", headers={"host": "evil.example"})
    assert answer.status_code == 200


@pytest.mark.parametrize("bound", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
async def test_any_loopback_address_guards_the_host(bound: str) -> None:
    app = OriginGuard(PlainTextResponse("ok"), bound_host=bound)
    async with _client(app) as client:
        answer = await client.get("/", headers={"host": "evil.example"})
    assert answer.status_code == 403


async def test_options_without_origin_is_204(client: httpx.AsyncClient) -> None:
    assert (await client.options("/api/chat")).status_code == 204


def _client(app: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")
