"""Main of a process that measures this machine, or asks llama.cpp something, and ends.

Started as `python -m headrace.engine.measure FD`. In: one Question on the socket. Out: Findings,
the last of which is the answer or MeasureFailed. End of file on the socket means that nobody waits
any more: the process ends too, with the measurement at hand.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from headrace.engine.disk_speed import measure_disk
from headrace.engine.errors import EngineError
from headrace.engine.frames import frame, read_frames
from headrace.engine.gguf import read_model
from headrace.engine.hardware import cache_bytes
from headrace.engine.loading import pin
from headrace.engine.memory import this_memory
from headrace.engine.messages import (
    AskContextCost,
    ContextCost,
    Finding,
    Load,
    Measure,
    Measured,
    MeasureFailed,
    Measuring,
    Question,
    decode_question,
    encode,
)
from headrace.engine.openmp import installed_environment
from headrace.engine.profile import GpuDevice, KernelSpeed


def main() -> None:
    """Answer the question on the socket whose descriptor is the first argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        for data in read_frames(connection):
            _send(connection, _result(decode_question.decode(data), connection))
    except (BrokenPipeError, ConnectionResetError):
        pass


def _result(question: Question, connection: socket.socket) -> Finding:
    try:
        if isinstance(question, AskContextCost):
            return _ask(question.load)
        return _measure(question, connection)
    except EngineError as error:
        return MeasureFailed(str(error))


def _ask(load: Load) -> ContextCost:
    from headrace.engine import context_cost, llama  # as late as for a measurement

    llama.start_backend()
    return context_cost.ask_context_cost(read_model(Path(load.path)), load)


def _measure(wanted: Measure, connection: socket.socket) -> Measured:
    memory_bytes_per_s: float | None = None
    attention_flops: float | None = None
    gpus: tuple[GpuDevice, ...] | None = None
    kernels: list[KernelSpeed] = []
    disk = None
    if wanted.path:
        _send(connection, Measuring("the disk"))
        disk = measure_disk(Path(wanted.path))
    pin(wanted.cpus)
    if wanted.types or wanted.memory_and_gpus:
        for name, value in installed_environment().items():
            os.environ.setdefault(name, value)
        # Only now: the OpenMP library reads its environment when llama.cpp loads it.
        from headrace.engine import compute_speed, ggml, llama

        llama.start_backend()
        memory = compute_speed.working_memory(cache_bytes(Path("/")), this_memory().available_bytes)
        backends = ggml.list_backends()
        if wanted.memory_and_gpus:
            _send(connection, Measuring("memory"))
            memory_bytes_per_s = compute_speed.memory_bytes_per_s(memory, wanted.n_threads)
            attention_flops = compute_speed.attention_flops(backends[0], wanted.n_threads)
            gpus = compute_speed.gpu_devices(backends, memory)
        for name, type_id in wanted.types:
            _send(connection, Measuring(f"kernels of {name}"))
            kernels += compute_speed.kernel_speeds(
                backends, memory, name, type_id, wanted.n_threads
            )
    return Measured(
        memory_bytes_per_s=memory_bytes_per_s,
        attention_flops=attention_flops,
        gpus=gpus,
        kernels=tuple(kernels),
        disk=disk,
    )


def _send(connection: socket.socket, finding: Finding) -> None:
    connection.sendall(frame(encode(finding)))


if __name__ == "__main__":
    main()
