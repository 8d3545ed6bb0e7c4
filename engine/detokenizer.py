"""Token pieces in, text out: whole UTF-8 characters only, and nothing of a stop string.

Knows bytes and strings, no tokens and no model.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Turns the byte pieces of one sequence into text that can be sent at once.

    Bytes of an unfinished character are held back, and so is a tail that may be the beginning of a
    stop string. Once a stop string is found, is_stopped is true and no more text comes.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(s for s in stop if s)
        # Bytes that are no UTF-8 at all become U+FFFD; an unfinished tail just waits.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.is_stopped = False

    def push(self, piece: bytes) -> str:
        """Return the text that piece makes certain; "" if all of it must wait."""
        if self.is_stopped:
            return ""
        text = self._held + self._decoder.decode(piece)
        if not self._stop:
            return text
        # The stop string that is whole first counts, however the text came in pieces.
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        n_held = self._n_open(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """Return the text still held back at the end; the bytes of a cut character are dropped."""
        text, self._held = self._held, ""
        return text

    def _n_open(self, text: str) -> int:
        """Return the length of the longest tail of text that begins a stop string."""
        longest = max(len(s) for s in self._stop) - 1
        for n in range(min(longest, len(text)), 0, -1):
            tail = text[-n:]
            if any(s.startswith(tail) for s in self._stop):
                return n
        return 0
