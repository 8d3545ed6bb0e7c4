"""Waiting for what is to become true soon, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Return when condition holds; AssertionError naming what after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not {what}"
        time.sleep(0.05)
