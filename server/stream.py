"""One answer on its way out: events of the engine come in, HTTP goes out, as NDJSON or one object.

An Exchange lives from the checked request to the terminal record and is the ASGI application that
sends it. Whatever happens, the client gets one end: the last record, an error with its status if
nothing was sent before, or an error line; and the engine forgets the request. Knows neither options
nor templates: those are the job's, and what a record looks like is records.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from headrace.engine.client import RequestEvent, Stream
from headrace.engine.errors import EngineError
from headrace.engine.library import Model
from headrace.engine.messages import Done, Failed, Logprob, Token
from headrace.server.errors import (
    INTERNAL,
    JSON_TYPE,
    ShuttingDown,
    error_body,
    error_of,
    error_text,
)
from headrace.server.log import RequestLog
from headrace.server.models import LoadedModel, Models
from headrace.server.records import Records, final_fields, logprob_fields

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Clients give up when no header comes for 300 s, some when no record comes for a while, so a long
# wait is filled with empty records. Before the first of them an error still has its own status.
LOAD_PATIENCE_S = 60.0
FIRST_TOKEN_PATIENCE_S = 0.5
HEARTBEAT_S = 5.0

NDJSON_HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the lines
]

# A generation that the engine has accepted, or a whole record that is the answer already.
Beginning = Stream | bytes


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: what it needs, how its answer looks, and how it begins on its model."""

    model: Model
    keep_alive_s: float | None
    records: Records
    is_streamed: bool
    arrived_ns: int
    begin: Callable[[LoadedModel], Awaitable[Beginning]]


class Exchange:
    """The ASGI application that runs one job and sends its answer."""

    def __init__(self, models: Models, job: Job) -> None:
        self._models = models
        self._job = job
        self._log = RequestLog(str(job.model.name))
        self._load_ns = 0
        self._lines: list[bytes] = []
        self._texts: list[str] = []
        self._logprobs: list[Logprob] = []
        self._has_started = False
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._log.path = scope["path"]
        if scope.get("client"):
            self._log.client = scope["client"][0]
        try:
            await self._run(receive)
        except EngineError as error:
            await self._fail(error)
        except Exception:  # a bug, and the answer still needs its end
            logger.exception("%s failed", self._log.path)
            await self._fail(EngineError(INTERNAL))
        finally:
            self._log.write()

    async def _run(self, receive: Receive) -> None:
        """Work until the answer is sent, the client has gone, or the server is to stop."""
        work = asyncio.create_task(self._work())
        gone = asyncio.create_task(_disconnect(receive))
        stop = asyncio.create_task(self._models.stopping.wait())
        try:
            await asyncio.wait((work, gone, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
        finally:
            for task in (work, gone, stop):
                task.cancel()
        if not work.cancelled():
            work.result()
        elif gone.done():
            self._log.finish, self._log.status = "disconnected", 499
        else:
            raise ShuttingDown

    async def _work(self) -> None:
        job = self._job
        with self._models.lease(job.model, job.keep_alive_s) as lease:
            loaded = await self._patiently(lease.loaded(), LOAD_PATIENCE_S)
            self._load_ns = self._elapsed_ns()
            beginning = await job.begin(loaded)
            if isinstance(beginning, bytes):
                self._log.finish = "answered"
                await self._answer(beginning)
                return
            self._log.uid = beginning.uid
            try:
                await self._relay(beginning)
            finally:
                beginning.cancel()

    async def _relay(self, stream: Stream) -> None:
        """Pass on the events of a generation until it ends; what came together is one write."""
        event: RequestEvent | None
        event = await self._patiently(stream.next(), FIRST_TOKEN_PATIENCE_S)
        self._log.ttft_s = self._elapsed_ns() / 1e9
        while True:
            while isinstance(event, Token):
                self._take(event.text, event.logprobs)
                event = stream.next_nowait()
            if isinstance(event, Done):
                await self._finish(event)
                return
            await self._flush()
            if isinstance(event, Failed):
                raise error_of(event)
            assert event is None, event
            event = await stream.next()

    def _take(self, text: str, logprobs: Sequence[Logprob]) -> None:
        """Make text of the engine content of the answer: all of it passes here, in order.

        Reasoning and tool calls are to be told apart here.
        """
        if self._job.is_streamed:
            self._lines.append(self._job.records.chunk(text, logprobs))
        else:
            self._texts.append(text)
            self._logprobs += logprobs

    async def _flush(self) -> None:
        if self._lines:
            await self._write(b"".join(self._lines))
            self._lines.clear()

    async def _finish(self, done: Done) -> None:
        """Send the text that was held back, if any, and the last record."""
        self._log.timings, self._log.finish = done.timings, done.reason
        if done.text or done.logprobs:
            self._take(done.text, done.logprobs)
        fields = final_fields(done, self._elapsed_ns(), self._load_ns)
        if self._logprobs:
            fields["logprobs"] = logprob_fields(self._logprobs)
        record = self._job.records.record("".join(self._texts), fields)
        if self._job.is_streamed:
            await self._write(b"".join((*self._lines, record, b"\n")), is_last=True)
        else:
            await self._send_object(200, record)

    async def _patiently(self, waited_for: Awaitable[T], patience_s: float) -> T:
        """Await waited_for; a streamed answer gets empty records once that takes longer."""
        if not self._job.is_streamed:
            return await waited_for
        task = asyncio.ensure_future(waited_for)
        try:
            while not (await asyncio.wait((task,), timeout=patience_s))[0]:
                await self._write(self._job.records.chunk(""))
                patience_s = HEARTBEAT_S
            return task.result()
        finally:
            task.cancel()

    def _elapsed_ns(self) -> int:
        return max(time.perf_counter_ns() - self._job.arrived_ns, 1)

    async def _answer(self, record: bytes) -> None:
        """Send record as the whole answer; it is a line if empty records had to go before it."""
        if self._has_started:
            await self._write(record + b"\n", is_last=True)
        else:
            await self._send_object(200, record)

    async def _fail(self, error: EngineError) -> None:
        """Send error as the end of the answer."""
        text = error_text(error, is_midway=self._has_started)
        self._log.finish = f"error: {text}"
        if self._has_started:
            await self._write(error_body(text) + b"\n", is_last=True)
        else:
            self._log.status = error.status
            await self._send_object(error.status, error_body(text))

    async def _send_object(self, status: int, body: bytes) -> None:
        length = str(len(body)).encode()
        await self._start(
            status, [(b"content-type", JSON_TYPE.encode()), (b"content-length", length)]
        )
        await self._send({"type": "http.response.body", "body": body})

    async def _write(self, lines: bytes, *, is_last: bool = False) -> None:
        if not self._has_started:
            await self._start(200, NDJSON_HEADERS)
        await self._send({"type": "http.response.body", "body": lines, "more_body": not is_last})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def _disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection, its reading end or both."""
    while (await receive())["type"] != "http.disconnect":
        pass
