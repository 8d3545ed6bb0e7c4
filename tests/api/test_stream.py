"""How an answer ends: disconnects, deaths of the engine, long waits, the server's own end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine.messages import Accepted, Failed, Token
from headrace.server.models import Models

pytestmark = pytest.mark.anyio

GENERATE = ("/api/generate", {"model": "m", "prompt": "x"})
CHAT = ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "x"}]})
Call = Callable[[str, dict[str, Any]], Any]


def waits(request: Any) -> list[Any]:
    """Play an engine that has accepted the prompt and is still reading it."""
    return [Accepted(uid=request.uid, n_prompt=7)]


def starts(request: Any) -> list[Any]:
    return [*waits(request), Token(uid=request.uid, text="a")]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.001)


async def accepted_by(engines: Any) -> Any:
    """Return the engine once it has a generation."""
    await until(lambda: bool(engines.started and engines.only.generations))
    return engines.only


@pytest.mark.parametrize("play", [waits, starts])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("request_", [GENERATE, CHAT])
async def test_client_that_leaves_frees_its_place_in_the_engine(
    call: Call, engines: Any, play: Any, stream: bool, request_: Any
) -> None:
    engines.play = play
    path, body = request_
    exchange = call(path, body | {"stream": stream})
    engine = await accepted_by(engines)
    exchange.leave()
    await asyncio.wait_for(exchange.task, 1)
    assert engine.cancelled == [engine.generations[0].uid]
    assert not exchange.is_complete


async def test_client_that_leaves_during_the_load_stops_it(
    call: Call, engines: Any, models: Models
) -> None:
    engines.gate.clear()
    exchange = call(*GENERATE)
    await until(lambda: engines.n_starting == 1)
    exchange.leave()
    await asyncio.wait_for(exchange.task, 1)
    await until(lambda: engines.n_cancelled_loads == 1)
    assert models.residences() == []


async def test_load_goes_on_for_those_who_stay(call: Call, engines: Any) -> None:
    engines.gate.clear()
    leaving, staying = call(*GENERATE), call(*GENERATE)
    await asyncio.sleep(0.01)
    leaving.leave()
    await asyncio.wait_for(leaving.task, 1)
    engines.gate.set()
    await asyncio.wait_for(staying.task, 1)
    assert staying.records[-1]["done"] is True
    assert engines.n_cancelled_loads == 0


async def test_pieces_leave_as_they_come_and_together_if_they_come_together(
    call: Call, engines: Any, done: Any
) -> None:
    engines.play = starts
    exchange = call(*GENERATE)
    await exchange.wait_for(lambda: exchange.n_writes == 1)
    engine, uid = engines.only, engines.only.generations[0].uid
    engine.put(Token(uid=uid, text="b"))
    engine.put(Token(uid=uid, text="c"))
    await exchange.wait_for(lambda: exchange.n_writes == 2)
    engine.put(done(uid, 3))
    await exchange.task
    assert [record["response"] for record in exchange.records] == ["a", "b", "c", ""]
    assert exchange.n_writes == 3
    assert exchange.headers["x-accel-buffering"] == "no"


async def test_long_prefill_gets_headers_and_an_empty_record(
    call: Call, engines: Any, done: Any
) -> None:
    engines.play = waits
    exchange = call(*CHAT)
    engine = await accepted_by(engines)
    await exchange.wait_for(lambda: exchange.n_writes == 1)
    assert exchange.status == 200
    [empty] = exchange.records
    assert (empty["message"]["content"], empty["done"]) == ("", False)
    engine.put(done(engine.generations[0].uid, 0))
    await exchange.task
    assert [record["done"] for record in exchange.records] == [False, True]


async def test_error_after_an_empty_record_is_the_last_line(call: Call, engines: Any) -> None:
    engines.play = waits
    exchange = call(*GENERATE)
    engine = await accepted_by(engines)
    await exchange.wait_for(lambda: exchange.n_writes == 1)
    uid = engine.generations[0].uid
    engine.put(Failed(uid=uid, kind="ModelUnusable", status=500, message="status -3"))
    await exchange.task
    assert exchange.status == 200
    assert exchange.records[-1] == {"error": "status -3"}
    assert exchange.is_complete


async def test_prompt_answer_without_stream_waits_in_silence(call: Call, engines: Any) -> None:
    engines.play = waits
    exchange = call(GENERATE[0], GENERATE[1] | {"stream": False})
    await accepted_by(engines)
    await asyncio.sleep(0.6)
    assert exchange.status == 0
    exchange.leave()
    await exchange.task


@pytest.mark.parametrize("stream", [True, False])
async def test_death_before_the_first_byte_is_a_500(call: Call, engines: Any, stream: bool) -> None:
    engines.play = waits
    exchange = call(GENERATE[0], GENERATE[1] | {"stream": stream})
    (await accepted_by(engines)).die()
    await exchange.task
    assert exchange.status == 500
    [record] = exchange.records
    assert record["error"].startswith("model runner has unexpectedly stopped, this may be due")


async def test_death_in_mid_stream_is_one_error_line(call: Call, engines: Any) -> None:
    engines.play = starts
    exchange = call(*CHAT)
    await exchange.wait_for(lambda: exchange.n_writes == 1)
    engines.only.die()
    await exchange.task
    assert exchange.status == 200
    assert [next(iter(record)) for record in exchange.records] == ["model", "error"]
    error = exchange.records[-1]["error"]
    assert error.startswith("an error was encountered while running the model")
    assert exchange.is_complete


async def test_next_request_after_a_death_gets_a_new_engine(
    call: Call, engines: Any, says: Any
) -> None:
    engines.play = waits
    dead = call(*GENERATE)
    (await accepted_by(engines)).die()
    await dead.task
    engines.play = says("b")
    exchange = call(*GENERATE)
    await exchange.task
    assert exchange.records[0]["response"] == "b"
    assert [engine.is_closed for engine in engines.started] == [True, False]


@pytest.mark.parametrize(("play", "status"), [(waits, 503), (starts, 200)])
async def test_end_of_the_server_ends_open_answers_with_an_error(
    call: Call, engines: Any, models: Models, play: Any, status: int
) -> None:
    engines.play = play
    exchange = call(*GENERATE)
    engine = await accepted_by(engines)
    await asyncio.sleep(0.01)
    models.stop()
    await asyncio.wait_for(exchange.task, 1)
    assert exchange.status == status
    assert exchange.records[-1] == {"error": "server is shutting down"}
    assert exchange.is_complete
    assert len(engine.cancelled) == 1


async def test_end_of_the_server_ends_a_load(call: Call, engines: Any, models: Models) -> None:
    engines.gate.clear()
    exchange = call(*GENERATE)
    await until(lambda: engines.n_starting == 1)
    await models.close()
    await asyncio.wait_for(exchange.task, 1)
    assert exchange.records == [{"error": "server is shutting down"}]
    assert engines.n_cancelled_loads == 1


async def test_more_requests_than_the_queue_holds_are_refused_at_once(
    call: Call, engines: Any
) -> None:
    engines.play = waits
    open_ = [call(*GENERATE) for _ in range(3)]  # one slot and a queue of two
    await accepted_by(engines)
    refused = call(*GENERATE)
    await refused.task
    assert refused.status == 503
    assert refused.records == [
        {"error": "server busy, please try again.  maximum pending requests exceeded"}
    ]
    open_[0].leave()
    await open_[0].task
    taken = call(*GENERATE)
    await until(lambda: len(engines.only.generations) == 4)
    for exchange in (*open_[1:], taken):
        exchange.leave()
        await exchange.task


async def test_a_finished_request_is_one_line_of_log_without_its_text(
    call: Call, engines: Any, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.requests")
    engines.play = says("secret answer")
    await call("/api/generate", {"model": "M", "prompt": "secret question"}).task
    [line] = [r.message for r in caplog.records if r.name == "headrace.requests"]
    assert "secret" not in line
    for part in ("uid=", "model=m:latest", "n_prompt=7", "n_cached=3", "n_generated=1"):
        assert part in line
    assert "finish='stop' client=127.0.0.1 path=/api/generate status=200" in line
    assert "tokens_per_s=250.00" in line
