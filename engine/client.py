"""The server's end of an engine process: starts it, gives it commands, hands out its events.

The only file that starts, ends and reaps processes. Belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import sys
from collections import deque
from typing import ClassVar

from headrace.engine.errors import EngineDied, ModelUnusable
from headrace.engine.frames import FrameBuffer, frame
from headrace.engine.messages import (
    Accepted,
    Cancel,
    ContextChanged,
    Count,
    Counted,
    Done,
    Event,
    Failed,
    Generate,
    Load,
    Loaded,
    LoadFailed,
    Status,
    Token,
    decode_events,
    encode,
)

logger = logging.getLogger(__name__)

# What an engine process gets to end by itself, and then after SIGTERM.
CLOSE_S = 5.0

RequestEvent = Accepted | Token | Done | Failed | Counted


class Stream:
    """The events of one request, in order; the last is Done, Failed, Counted, or an EngineDied."""

    def __init__(self, client: EngineClient, uid: int) -> None:
        self._client = client
        self.uid = uid
        self._events: deque[RequestEvent | EngineDied] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> RequestEvent:
        """Wait for the next event.

        Raises:
            EngineDied: the engine process ended before the request did.
        """
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        if isinstance(event, EngineDied):
            self._events.append(event)
            raise event
        return event

    def next_nowait(self) -> RequestEvent | None:
        """Return the next event if it is there already."""
        if not self._events or isinstance(self._events[0], EngineDied):
            return None
        event = self._events.popleft()
        assert not isinstance(event, EngineDied)
        return event

    def cancel(self) -> None:
        """Let the engine forget the request; nothing happens if it has ended."""
        self._client.forget(self.uid)

    def put(self, event: RequestEvent | EngineDied) -> None:
        """Add an event; the client's."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """Turns bytes of the socket into events."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._frames = FrameBuffer()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            for event in decode_events.decode(message):
                self._client.dispatch(event)

    def connection_lost(self, _error: Exception | None) -> None:
        self._client.lose()


class EngineClient:
    """One engine process with one loaded model."""

    worker_module: ClassVar[str] = "headrace.engine.worker"

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._streams: dict[int, Stream] = {}
        self._uids = itertools.count(1)
        self._ready: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._reaper: asyncio.Task[None] | None = None
        self.n_ctx = 0
        """Tokens of each sequence's context; follows the engine's changes."""
        self.context_bytes = 0
        self.loaded: Loaded
        self.status = Status()

    @classmethod
    async def start(cls, load: Load) -> EngineClient:
        """Start an engine process and wait until it has loaded the model.

        A caller that is cancelled meanwhile leaves no process.

        Raises:
            ModelUnusable: the engine can't load the file.
            EngineDied: the process ended while loading.
        """
        client = cls()
        try:
            await client._spawn(load)
            client.loaded = await client._ready
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(client.close()))
            raise
        client.n_ctx = client.loaded.n_ctx
        client.context_bytes = client.loaded.context_bytes
        return client

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def is_alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def n_open(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._streams)

    def next_uid(self) -> int:
        """Return an id for a new request."""
        return next(self._uids)

    def submit(self, command: Generate | Count) -> Stream:
        """Send a request, whose uid comes from next_uid, and return its events to be."""
        stream = Stream(self, command.uid)
        if not self.is_alive:
            stream.put(EngineDied("the engine process has ended"))
            return stream
        self._streams[command.uid] = stream
        self._send(command)
        return stream

    def forget(self, uid: int) -> None:
        """Cancel a request if it is open."""
        if self._streams.pop(uid, None) is not None and self.is_alive:
            self._send(Cancel(uid))

    async def close(self) -> None:
        """End the process, by closing its socket, SIGTERM, or SIGKILL; returns when it is gone."""
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        for end in (None, signal.SIGTERM, signal.SIGKILL):
            if end is not None and self._process.returncode is None:
                logger.warning("engine process %d: %s", self.pid, end.name)
                self._process.send_signal(end)
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
                break
            except TimeoutError:
                continue
        if self._reaper is not None:
            await self._reaper

    def dispatch(self, event: Event) -> None:
        """Hand an event to its request; one for a request just cancelled is dropped."""
        if isinstance(event, Loaded | LoadFailed):
            if self._ready.done():  # whoever started the engine has just been cancelled
                return
            if isinstance(event, Loaded):
                self._ready.set_result(event)
            else:
                self._ready.set_exception(ModelUnusable(event.message))
        elif isinstance(event, ContextChanged):
            self.n_ctx, self.context_bytes = event.n_ctx, event.context_bytes
        elif isinstance(event, Status):
            self.status = event
        else:
            ends = isinstance(event, Done | Failed | Counted)
            stream = self._streams.pop(event.uid, None) if ends else self._streams.get(event.uid)
            if stream is not None:
                stream.put(event)

    def lose(self) -> None:
        """Begin the end: the socket is closed, so the process is ending or must."""
        if self._process is not None and self._reaper is None:
            self._reaper = asyncio.get_running_loop().create_task(self._reap())

    async def _spawn(self, load: Load) -> None:
        ours, theirs = socket.socketpair()
        try:
            # A session of its own: Ctrl-C in the terminal is for the server alone.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self.worker_module, str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: _Connection(self), sock=ours)
        self._transport = transport
        self._send(load)

    def _send(self, command: Load | Generate | Count | Cancel) -> None:
        assert self._transport is not None
        self._transport.write(frame(encode(command)))

    async def _reap(self) -> None:
        """Collect the exit status and end every open request with it."""
        assert self._process is not None
        try:
            status = await asyncio.wait_for(self._process.wait(), CLOSE_S)
        except TimeoutError:
            self._process.kill()
            status = await self._process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        logger.log(
            logging.INFO if status == 0 else logging.ERROR,
            "engine process %d ended %s",
            self.pid,
            how,
        )
        died = EngineDied(f"the engine process ended {how}")
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(died)
        if not self._ready.done():
            self._ready.set_exception(died)
