"""A real HTTP server on a real socket, with scripted engines: its start, its end, its bytes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from headrace.config import Settings
from headrace.engine.errors import EngineError, ModelUnusable
from headrace.engine.messages import Accepted, Token
from headrace.server.app import serve
from headrace.server.models import Models

pytestmark = pytest.mark.anyio


@dataclass
class Running:
    """A server that runs in this loop, and a client of it."""

    task: asyncio.Task[EngineError | None]
    client: httpx.AsyncClient
    address: tuple[str, int]


@pytest.fixture
async def running(settings: Settings, models: Models) -> AsyncIterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    task = asyncio.ensure_future(serve(settings, models, listener, models.find("m")))
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        await client.get("/")  # from now on a signal is the server's
        yield Running(task, client, (host, port))
    if not task.done():
        os.kill(os.getpid(), signal.SIGTERM)
    await task


async def test_first_model_is_loaded_at_once(running: Running, engines: Any) -> None:
    async with asyncio.timeout(5):
        while not (await running.client.get("/api/ps")).json()["models"]:
            await asyncio.sleep(0.01)
    assert engines.only.load.name == "m:latest"


async def test_load_that_fails_at_the_start_ends_the_server(
    settings: Settings, models: Models, engines: Any
) -> None:
    engines.failure = ModelUnusable("wrong magic")
    listener = socket.create_server(("127.0.0.1", 0))
    error = await asyncio.wait_for(serve(settings, models, listener, models.find("m")), 5)
    assert error is engines.failure


async def test_head_and_error_answers_are_complete(running: Running) -> None:
    head = await running.client.head("/api/tags")
    assert (head.status_code, head.content) == (200, b"")
    assert "server" not in head.headers
    missing = await running.client.post("/api/chat", json={"model": "x"})
    assert missing.json() == {"error": "model 'x' not found"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_open_streams_with_an_error_line(
    running: Running, engines: Any, number: signal.Signals
) -> None:
    engines.play = lambda request: [
        Accepted(uid=request.uid, n_prompt=1),
        Token(uid=request.uid, text="a"),
    ]
    body = {"model": "m", "prompt": "x"}
    async with running.client.stream("POST", "/api/generate", json=body) as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["response"] == "a"
        os.kill(os.getpid(), number)
        assert [json.loads(line) async for line in lines] == [{"error": "server is shutting down"}]
    assert await asyncio.wait_for(running.task, 3) is None
    assert all(engine.is_closed for engine in engines.started)


async def test_closed_connection_cancels_the_request(running: Running, engines: Any) -> None:
    engines.play = lambda request: [Accepted(uid=request.uid, n_prompt=1)]
    body = b'{"model":"m","prompt":"x","stream":false}'
    _, writer = await asyncio.open_connection(*running.address)
    head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(5):
        while not (engines.started and engines.only.generations):
            await asyncio.sleep(0.01)
        writer.close()
        while not engines.only.cancelled:
            await asyncio.sleep(0.01)


async def test_body_that_breaks_off_does_no_harm(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection(*running.address)
    writer.write(b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    assert (await running.client.get("/")).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
