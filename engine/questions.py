"""What a process of its own finds out: how fast this machine is, what llama.cpp says of a model.

In: a Question. Out: the answer. The process ends with it, and nothing of llama.cpp comes into this
one.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from headrace.engine.errors import EngineDied, EngineError
from headrace.engine.frames import frame, read_frames
from headrace.engine.messages import (
    AskContextCost,
    ContextCost,
    Load,
    Measure,
    Measured,
    MeasureFailed,
    Measuring,
    Question,
    decode_finding,
    encode,
)

Progress = Callable[[str], None]


def measure(wanted: Measure, progress: Progress) -> Measured:
    """Have a process measure what is wanted; progress hears what that is at the moment.

    Raises:
        EngineError: it can't be measured, or the process ended before it was done.
    """
    found = _found(wanted, progress)
    assert isinstance(found, Measured), f"{found} is no answer to Measure"
    return found


def context_cost(load: Load) -> ContextCost:
    """Have a process ask llama.cpp what contexts take for a model that is loaded as load says.

    Raises:
        EngineError: llama.cpp refuses the model, or the process ended before it answered.
    """
    found = _found(AskContextCost(load), lambda what: None)
    assert isinstance(found, ContextCost), f"{found} is no answer to AskContextCost"
    return found


def _found(question: Question, progress: Progress) -> Measured | ContextCost:
    """Return what the process finds; it is gone when this returns."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            # A session of its own: Ctrl-C is for this process. What libraries print is not for
            # the stdout of a command.
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace.engine.measure", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        try:
            ours.sendall(frame(encode(question)))
            for data in read_frames(ours):
                finding = decode_finding.decode(data)
                if isinstance(finding, MeasureFailed):
                    raise EngineError(finding.message)
                if not isinstance(finding, Measuring):
                    return finding
                progress(finding.what)
            status = process.wait()
        finally:
            process.kill()
            process.wait()
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    raise EngineDied(f"the measuring process ended {how} before it was done")
