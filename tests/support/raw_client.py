"""A client of few microseconds, so that benchmarks measure the server and not the client."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, NamedTuple

import orjson


class Record(NamedTuple):
    """One line of a stream and when it came, in ns of time.monotonic_ns."""

    at_ns: int
    data: dict[str, Any]


async def read_stream(port: int, path: str, body: dict[str, Any]) -> list[Record]:
    """Post body to the loopback address and return the records of the NDJSON answer."""
    lines = await _read_lines(port, path, body)
    return [Record(at_ns, orjson.loads(line)) for at_ns, line in lines]


async def read_events(port: int, path: str, body: dict[str, Any]) -> list[Record]:
    """Post body to the loopback address and return the records of the SSE answer."""
    lines = await _read_lines(port, path, body)
    data = [(at, line[6:]) for at, line in lines if line.startswith(b"data: {")]
    return [Record(at_ns, orjson.loads(line)) for at_ns, line in data]


async def _read_lines(port: int, path: str, body: dict[str, Any]) -> list[tuple[int, bytes]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    status = await reader.readline()
    while (await reader.readline()).strip():
        pass
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r}: {await reader.read(4096)!r}")
    lines = []
    while n := int(await reader.readline(), 16):
        chunk = await reader.readexactly(n + 2)
        now = time.monotonic_ns()
        lines += [(now, line) for line in chunk.splitlines() if line]
    writer.close()
    await writer.wait_closed()
    return lines
