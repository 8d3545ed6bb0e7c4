"""Frames on a stream socket: a 4-byte little-endian length, then that many bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """Return data with its length before it."""
    return _LENGTH.pack(len(data)) + data


class FrameBuffer:
    """Collects bytes as they come and gives out the frames that are whole."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add data and yield each frame that it completes."""
        buffer = self._data
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (n,) = _LENGTH.unpack_from(buffer, start)
            stop = start + _LENGTH.size + n
            if len(buffer) < stop:
                break
            yield bytes(buffer[start + _LENGTH.size : stop])
            start = stop
        del buffer[:start]


def read_frames(connection: socket.socket) -> Iterator[bytes]:
    """Yield the frames that arrive on a blocking socket until its end or reset."""
    frames = FrameBuffer()
    while True:
        try:
            data = connection.recv(1 << 18)
        except ConnectionResetError:
            return
        if not data:
            return
        yield from frames.feed(data)
