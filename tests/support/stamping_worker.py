"""An engine process whose chunks carry the time at which they were sent, for latency figures."""

from __future__ import annotations

import time

import msgspec

from headrace.engine import worker
from headrace.engine.messages import Event, Token

_send = worker.Worker.send


def send(self: worker.Worker, events: list[Event]) -> None:
    """Send events with the text of each chunk replaced by the monotonic clock, ns."""
    now = str(time.monotonic_ns()) + " "
    stamped: list[Event] = [
        msgspec.structs.replace(event, text=now) if isinstance(event, Token) else event
        for event in events
    ]
    _send(self, stamped)


if __name__ == "__main__":
    worker.Worker.send = send  # type: ignore[method-assign]  # the point of this module
    worker.main()
