"""Bytes of model files, read past the page cache; the only file that knows our C module.

In: a path. Out: a file object, a checksum. Runs in engine processes and in commands that have one's
rights, never in the server process.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from headrace.engine.errors import ModelFileError
from headrace.native import Reader as Reader
from headrace.native import Stream as Stream
from headrace.native import StreamStats as StreamStats

logger = logging.getLogger(__name__)

# Headers are read in a few steps; a checksum keeps as many pieces in flight as its threads take.
_HEADER_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_N_PIECES = 4


class DirectFile(io.RawIOBase):
    """A read-only file object over direct reads; owns its Reader."""

    def __init__(self, path: Path) -> None:
        """Open path; a file system that refuses direct reads is read through its cache, and said.

        Raises:
            OSError: the file can't be opened or is not a regular file.
        """
        self._reader = Reader(path)
        self._position = 0
        if not self._reader.is_direct:
            logger.warning("%s: its file system refuses direct reads, reading through it", path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]  # as io calls it
        (n,) = self._reader.read_into([(self._position, buffer)])
        self._position += n
        return n

    def close(self) -> None:
        self._reader.close()
        super().close()


def open_direct(path: Path) -> BinaryIO:
    """Open path for the header reader: buffered, over direct reads."""
    return cast(BinaryIO, io.BufferedReader(DirectFile(path), _HEADER_BUFFER_BYTES))


def checksum(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """Return the SHA-256 of the file at path; progress hears of bytes done and bytes in all.

    Raises:
        ModelFileError: the file can't be read, or became shorter meanwhile.
    """
    digest = hashlib.sha256()
    try:
        with Reader(path, n_threads=_N_PIECES) as reader:
            buffers = [bytearray(_PIECE_BYTES) for _ in range(_N_PIECES)]
            offset = 0
            while offset < reader.size:
                starts = range(offset, offset + _N_PIECES * _PIECE_BYTES, _PIECE_BYTES)
                lengths = reader.read_into(list(zip(starts, buffers, strict=True)))
                for buffer, n in zip(buffers, lengths, strict=True):
                    digest.update(memoryview(buffer)[:n])
                if not (n_read := sum(lengths)):
                    raise ModelFileError(f"{path}: ends at {offset}, expected {reader.size} bytes")
                offset += n_read
                progress(offset, reader.size)
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {str(error.strerror).lower()}") from error
    return digest.hexdigest()
