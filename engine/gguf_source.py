"""The bytes of a GGUF header in order: a file in, numbers and strings out, never past its end.

Knows lengths and bounds, not what a header means.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

from headrace.engine.errors import ModelFileError

# 300,000 tokens and their merges take some 20 MiB; this bounds what a crafted file costs.
_MAX_HEADER_BYTES = 256 << 20
_FIRST_READ_BYTES = 1 << 20

U64 = Struct("<Q")


class Source:
    """The bytes of a header in order; reads on in the file as they are asked for."""

    def __init__(self, path: Path, file: BinaryIO, n_bytes: int) -> None:
        self.position = 0
        self.n_bytes = n_bytes  # of the whole file
        self.item = "the preamble"  # what is being read, for errors
        self._path, self._file = path, file
        self._data = bytearray()

    def error(self, text: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: {text}")

    def digest(self) -> bytes:
        """Return the SHA-256 of what was read."""
        return hashlib.sha256(self._data[: self.position]).digest()

    def take(self, n_bytes: int) -> bytes:
        start, self.position = self.position, self.position + n_bytes
        if self.position > len(self._data):
            self._fill(self.position)
        return bytes(self._data[start : self.position])

    def unpack(self, layout: Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def number(self, layout: Struct) -> int:
        return int(self.unpack(layout)[0])

    def text(self) -> str:
        """Read a string; what is not UTF-8 in it becomes U+FFFD."""
        return self.take(self.number(U64)).decode(errors="replace")

    def check_room(self, n_items: int, item_bytes: int, what: str) -> None:
        """Check that the file can hold n_items of at least item_bytes, before a loop over them."""
        left = self.n_bytes - self.position
        if n_items * item_bytes > left:
            raise self.error(
                f"announces {n_items} {what}, the {left} bytes that follow can't hold them:"
                " truncated or damaged"
            )

    def take_strings(self, n_strings: int) -> bytes:
        """Read n_strings with their lengths, not decoded."""
        start = end = self.position
        unpack, data, n_filled = U64.unpack_from, self._data, len(self._data)
        for _ in range(n_strings):
            length_at, end = end, end + U64.size
            if end > n_filled:
                n_filled = self._fill(end)
            end += unpack(data, length_at)[0]
            if end > n_filled:
                n_filled = self._fill(end)
        self.position = end
        return bytes(data[start:end])

    def _fill(self, end: int) -> int:
        """Read on until the buffer holds the bytes before end; return how many it holds."""
        what = f"{self.item} ends at byte {end}"
        if end > self.n_bytes:
            raise self.error(f"{what}, the file at {self.n_bytes}: truncated or damaged")
        if end > _MAX_HEADER_BYTES:
            raise self.error(f"{what}, expected at most {_MAX_HEADER_BYTES}")
        # Twice as much each time: few reads, and little tensor data read for nothing.
        target = min(max(end, 2 * len(self._data), _FIRST_READ_BYTES), self.n_bytes)
        self._data += self._file.read(target - len(self._data))
        if len(self._data) < end:
            raise self.error(f"became shorter than {end} bytes while it was read")
        return len(self._data)
