"""Plain llama.cpp, measured in a process of its own, under the memory limit that headrace keeps.

In: a Job and a cgroup. Out: a Measurement. The tests are the same and so is the Engine, over a
model that llama.cpp maps: the kernel reads what is used and drops what does not fit. Run as a
program it is that process: a Job comes on stdin, Lines go to stdout, and the end of stdin ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

from headrace.engine.errors import EngineError
from headrace.server.commands.measuring import Job, Measurement, Say, measure
from headrace.server.commands.memory_limit import enter


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the process: what it does, what it has measured, or why it can't."""

    say: str = ""
    measured: Measurement | None = None
    error: str = ""


def measure_apart(job: Job, group: Path | None, say: Say) -> Measurement:
    """Measure job in a new process, in the cgroup at group if there is one.

    Raises:
        EngineError: the process could not measure, or was killed.
    """
    command = [sys.executable, "-m", __name__]
    # A session of its own: Ctrl-C is for this process, which ends the other.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if group is not None:
            enter(group, process.pid)
        with contextlib.suppress(BrokenPipeError):  # it has ended: its status says why
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
        return _result(process.stdout, process, say)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _result(lines: IO[bytes], process: subprocess.Popen[bytes], say: Say) -> Measurement:
    for text in lines:
        line = msgspec.json.decode(text, type=Line)
        if line.measured is not None:
            return line.measured
        if line.error:
            raise EngineError(f"plain llama.cpp: {line.error}")
        say(f"plain llama.cpp: {line.say}")
    status = process.wait()
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    raise EngineError(f"plain llama.cpp ended {how} before it was measured")


def main() -> None:
    """Measure the job on stdin."""
    # What else prints to stdout goes to stderr.
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def send(line: Line) -> None:
        lines.write(msgspec.json.encode(line) + b"\n")

    try:
        send(Line(measured=measure(job, lambda text: send(Line(say=text)))))
    except EngineError as error:
        send(Line(error=str(error)))


def _end_with_stdin() -> None:
    """End the process when whoever started it has gone, by whatever way."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
