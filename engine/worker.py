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
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine import hardware, placement
from headrace.engine.errors import EngineError
from headrace.engine.frames import frame, read_frames
from headrace.engine.gguf import Header, read_model
from headrace.engine.messages import (
    Cancel,
    Command,
    Count,
    Counted,
    Event,
    Failed,
    Generate,
    Load,
    Loaded,
    LoadFailed,
    decode_command,
    encode,
)
from headrace.engine.openmp import installed_environment
from headrace.engine.prompt import prompt_tokens, tokenize_segments
from headrace.engine.tensors import read_tensors

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.llama import Model, Vocab

logger = logging.getLogger(__name__)

N_TOKENIZERS = 2


class Worker:
    """One loaded model behind one socket."""

    def __init__(self, connection: socket.socket, load: Load) -> None:
        """Load the model and start its engine thread.

        Raises:
            EngineError: the model can't be loaded.
        """
        started = time.perf_counter_ns()
        self._connection = connection
        self._send_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(
            N_TOKENIZERS, "tokenizer", initializer=_pin, initargs=(load.io_cpus,)
        )
        self._tokenising: dict[int, Future[None]] = {}
        self._engine = _load_engine(load, self.send)
        self._vocab: Vocab = self._engine.vocab
        self._thread = threading.Thread(
            target=self._run_engine, args=(load.decode_cpus,), name="engine", daemon=True
        )
        self._thread.start()
        self.send([_loaded(self._engine, load, time.perf_counter_ns() - started)])

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
        _pin(cpus)  # OpenMP's threads are made by this one and inherit its CPUs
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


def _load_engine(load: Load, emit: Callable[[list[Event]], None]) -> Engine:
    """Load the model that load names and make its Engine."""
    for name, value in installed_environment().items():
        os.environ.setdefault(name, value)
    # Only now: the OpenMP library reads its environment when llama.cpp loads it.
    from headrace.engine import engine, llama, weights

    header = read_model(Path(load.path), weights.open_direct)
    table = read_tensors(header)
    bytes_per_cell = placement.kv_bytes_per_cell(header, load.kv_type)
    available = hardware.available_memory_bytes(Path("/")) - placement.HEADROOM_BYTES
    budget = load.memory_bytes or available
    plan = placement.plan_weights(
        header, table, mode=load.mode, budget_bytes=budget, n_batch=load.n_batch,
        n_slots=load.n_slots,
        kv_bytes=placement.wanted_kv_bytes(header, table, load, bytes_per_cell, budget),
    )  # fmt: skip
    logger.info("%s", placement.describe(plan, budget))
    llama.start_backend()
    model = _load_model(header, plan)
    left = budget - plan.resident_bytes - plan.stream_bytes - plan.compute_bytes

    def plan_context(n_ctx: int) -> placement.ContextPlan:
        return placement.plan_context(
            n_ctx, load.n_slots, n_ctx_train=model.n_ctx_train, bytes_per_cell=bytes_per_cell,
            budget_bytes=left, widens=_widens(header),
        )  # fmt: skip

    return engine.Engine(model, load, plan_context, emit, n_ubatch=plan.n_ubatch)


def _load_model(header: Header, plan: placement.WeightsPlan) -> Model:
    """Load the model as planned, by llama.cpp's own loader or streamed."""
    from headrace.engine import llama, streaming

    if plan.mode == "full-resident":
        return llama.Model(header.path)
    stream = streaming.WeightStream(header, plan, llama.streaming_functions())
    return llama.Model(header.path, stream=stream)


def _widens(header: Header) -> bool:
    """Tell whether more cells than one sequence's leave the model's numbers as they are.

    With two sets of rope factors llama.cpp chooses one by the number of cells.
    """
    return not any("rope_factors_long" in tensor.name for tensor in header.tensors)


def _loaded(engine: Engine, load: Load, load_ns: int) -> Loaded:
    vocab, model = engine.vocab, engine.model
    return Loaded(
        n_ctx=engine.n_ctx,
        n_ctx_train=model.n_ctx_train,
        n_slots=load.n_slots,
        n_vocab=vocab.n_tokens,
        control_tokens=vocab.control_texts(),
        bos=vocab.text(vocab.bos),
        eos=vocab.text(vocab.eos),
        adds_bos=vocab.adds_bos,
        weights_bytes=model.size_bytes,
        context_bytes=engine.plan.n_bytes,
        load_ns=load_ns,
    )


def _pin(cpus: tuple[int, ...]) -> None:
    """Keep the calling thread on cpus; empty means anywhere."""
    if cpus:
        os.sched_setaffinity(0, cpus)


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
