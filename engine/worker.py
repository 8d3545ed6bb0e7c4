"""Main of an engine process: glue between a socket and an Engine.

Started as `python -m headrace.engine.worker FD`. The main thread reads commands and has prompts
tokenised in a small pool; the engine thread sends the events of each step. End of file on the
socket means that the server is gone: the process ends too. Reads no flag and no environment.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from headrace.engine.errors import EngineError
from headrace.engine.frames import frame, read_frames
from headrace.engine.loading import load_engine, pin
from headrace.engine.messages import (
    Cancel,
    Command,
    Count,
    Counted,
    Event,
    Failed,
    Generate,
    Load,
    LoadFailed,
    decode_command,
    encode,
)
from headrace.engine.prompt import prompt_tokens, tokenize_segments

logger = logging.getLogger(__name__)

N_TOKENIZERS = 2


class Worker:
    """One loaded model behind one socket."""

    def __init__(self, connection: socket.socket, load: Load) -> None:
        """Load the model and start its engine thread.

        Raises:
            EngineError: the model can't be loaded.
        """
        self._connection = connection
        self._send_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(
            N_TOKENIZERS, "tokenizer", initializer=pin, initargs=(load.io_cpus,)
        )
        self._tokenising: dict[int, Future[None]] = {}
        self._loaded = load_engine(load, self.send)
        self._engine = self._loaded.engine
        self._vocab = self._engine.vocab
        self._thread = threading.Thread(
            target=self._run_engine, args=(load.decode_cpus,), name="engine", daemon=True
        )
        self._thread.start()
        self.send([self._loaded.message])

    def send(self, events: list[Event]) -> None:
        """Send events as one frame; a closed socket is noticed by the reader."""
        try:
            with self._send_lock:
                self._connection.sendall(frame(encode(events)))
        except (BrokenPipeError, ConnectionResetError):
            pass

    def handle(self, command: Command) -> None:
        """Take one command; the main thread's."""
        if isinstance(command, Cancel):
            self._cancel(command.uid)
        elif isinstance(command, Generate):
            task = self._pool.submit(self._guard, command.uid, partial(self._submit, command))
            self._tokenising[command.uid] = task
            task.add_done_callback(lambda _: self._tokenising.pop(command.uid, None))
        elif isinstance(command, Count):
            self._pool.submit(self._guard, command.uid, partial(self._count, command))

    def close(self) -> None:
        """Stop the engine after the step at hand."""
        self._engine.stop()
        self._thread.join(timeout=2)
        if not self._thread.is_alive():
            self._loaded.keep_learnt()

    def _cancel(self, uid: int) -> None:
        task = self._tokenising.get(uid)
        if task is None:
            self._engine.cancel(uid)
        else:  # the engine does not know it yet
            task.add_done_callback(lambda _: self._engine.cancel(uid))

    def _submit(self, request: Generate) -> None:
        self._engine.submit(request, prompt_tokens(self._vocab, request))

    def _count(self, request: Count) -> None:
        lengths = tuple(len(tokenize_segments(self._vocab, prompt)) for prompt in request.prompts)
        self.send([Counted(uid=request.uid, n_tokens=lengths)])

    def _guard(self, uid: int, task: Callable[[], None]) -> None:
        try:
            task()
        except EngineError as error:
            failed = Failed(
                uid=uid, kind=type(error).__name__, status=error.status, message=str(error)
            )
            self.send([failed])
        except BaseException:
            _die()

    def _run_engine(self, cpus: tuple[int, ...]) -> None:
        pin(cpus)  # OpenMP's threads are made by this one and inherit its CPUs
        try:
            self._engine.run()
        except BaseException:
            _die()


def main() -> None:
    """Serve the commands of the socket whose descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes us
    connection = socket.socket(fileno=int(sys.argv[1]))
    commands = (decode_command.decode(data) for data in read_frames(connection))
    load = next(commands, None)
    if not isinstance(load, Load):
        sys.exit("the first command must be Load")
    _configure_log(load)
    worker = _start(connection, load)
    if worker is None:
        sys.exit(1)
    for command in commands:
        worker.handle(command)
    worker.close()
    # llama.cpp may still be in a long step; the process ends whatever its threads do.
    os._exit(0)


def _start(connection: socket.socket, load: Load) -> Worker | None:
    try:
        return Worker(connection, load)
    except EngineError as error:
        connection.sendall(frame(encode([LoadFailed(str(error))])))
        return None


def _configure_log(load: Load) -> None:
    logging.basicConfig(
        level=load.log_level.upper(),
        format=f"%(asctime)s %(levelname)s %(name)s [{load.name}] %(message)s",
        stream=sys.stderr,
    )


def _die() -> None:
    """End the process on a bug: every open request then ends with EngineDied."""
    logger.exception("the engine ends on an unexpected error")
    logging.shutdown()
    os._exit(70)


if __name__ == "__main__":
    main()
