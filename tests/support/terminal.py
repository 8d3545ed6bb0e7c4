"""A terminal of our own with a program in it: what a user types and sees."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType


class Terminal:
    """Runs a program on a new terminal; output is read as the test asks for it."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], n_columns: int = 80
    ) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, n_columns, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**environ, "TERM": "dumb"}, preexec_fn=lambda: _take_terminal(theirs),
        )  # fmt: skip
        os.close(theirs)
        self.output = ""
        """All that was shown."""
        self._seen = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        """Type text; "\\x03" is Ctrl-C and "\\x04" Ctrl-D."""
        os.write(self._fd, text.encode())

    def expect(self, text: str, timeout_s: float = 60) -> str:
        """Return what is shown up to text, from where the last call ended.

        Raises:
            AssertionError: text is not shown in time, or the program ends before.
        """
        end = time.monotonic() + timeout_s
        while (at := self.output.find(text, self._seen)) < 0:
            assert time.monotonic() < end, (text, self.output[self._seen :])
            assert self._read(), (text, self.output[self._seen :])
        shown = self.output[self._seen : at]
        self._seen = at + len(text)
        return shown

    def wait(self, timeout_s: float = 60) -> int:
        """Read to the end and return the program's exit status."""
        while self._read():
            pass
        return self.process.wait(timeout_s)

    def _read(self) -> bool:
        """Take in what is there, waiting a little; False at the end."""
        if not select.select([self._fd], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # Linux: EIO once the other end is closed
            return False
        self.output += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


def _take_terminal(fd: int) -> None:
    """Make fd the terminal of the calling process's session, so that Ctrl-C is a signal."""
    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
