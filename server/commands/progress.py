"""One line on the terminal that says what a command is doing."""

from __future__ import annotations

import shutil
import sys


def say(text: str) -> None:
    """Show text on stderr in place of what was shown before, "" for nothing; only on a terminal."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
