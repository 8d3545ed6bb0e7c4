"""Eight concurrent streams: headrace against the Python server of llama-cpp-python.

Same model, same threads, same greedy requests of both, one server at a time, interleaved. Timed:
from the first request to the last token; loading is outside. Needs the `server` extra of
llama-cpp-python in the same environment. Wanted: 1.4 times its tokens/s, a quarter of its p95 TTFT.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from raw_client import read_events, read_stream
from reporting import report, smollm2
from serving import free_port, serve

from headrace.engine import hardware

N_STREAMS = 8
N_TOKENS = 96
N_RUNS = 3
PROMPTS = [f"Write a story about {n} ships at sea." for n in range(2, 2 + N_STREAMS)]


Ask = Callable[[int, dict[str, Any], str], Awaitable[list[int]]]


class Run(NamedTuple):
    """Total tokens/s, the 95th percentile of TTFT, and the CPU used, in cores."""

    tokens_per_s: float
    ttft_s: float
    n_cores: float


def main() -> None:
    path, runs = smollm2(), {"headrace": [], "llama_cpp.server": []}  # type: ignore[var-annotated]
    for _ in range(N_RUNS):
        with (
            tempfile.TemporaryDirectory() as folder,
            serve(path, Path(folder, "log"), "--parallel", "8", "--context", "1024") as server,
        ):
            body = {"model": server.names()[0], "options": {"temperature": 0}}
            body["options"]["num_predict"] = N_TOKENS  # type: ignore[index]
            runs["headrace"].append(measure(server.process.pid, server.port, ours, body))
        with llama_cpp_server(path) as (process, port):
            runs["llama_cpp.server"].append(measure(process.pid, port, theirs, {}))
    for name, found in runs.items():
        report(f"{name}, 8 streams", [r.tokens_per_s for r in found], "tokens/s")
        report(f"{name}, 8 streams, TTFT p95", [r.ttft_s for r in found], "s")
        report(f"{name}, 8 streams, CPU", [r.n_cores / os.cpu_count() for r in found], "of a core")
    pairs = list(zip(runs["headrace"], runs["llama_cpp.server"], strict=True))
    speed = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
    report("headrace / llama_cpp.server, tokens/s", speed, "ratio", wanted=1.4)
    ttft = [a.ttft_s / b.ttft_s for a, b in pairs]
    report("headrace / llama_cpp.server, TTFT p95", ttft, "ratio", wanted=0.25)


def measure(pid: int, port: int, ask: Ask, body: dict[str, Any]) -> Run:
    """Send all prompts at once; ask returns the times of the tokens of one answer."""

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*(ask(port, body, prompt) for prompt in PROMPTS))

    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    cpu, started = _cpu_seconds(processes), time.monotonic_ns()
    answers = asyncio.run(all_at_once())
    seconds = (time.monotonic_ns() - started) / 1e9
    ttfts = [(times[0] - started) / 1e9 for times in answers]
    return Run(
        sum(len(times) for times in answers) / seconds,
        statistics.quantiles(ttfts, n=20)[-1],
        (_cpu_seconds(processes) - cpu) / seconds,
    )


async def ours(port: int, body: dict[str, Any], prompt: str) -> list[int]:
    """Return when each token came; a chunk that had to wait for its UTF-8 counts once."""
    messages = [{"role": "user", "content": prompt}]
    records = await read_stream(port, "/api/chat", {**body, "messages": messages})
    return [r.at_ns for r in records if r.data["message"]["content"]]


async def theirs(port: int, _body: dict[str, Any], prompt: str) -> list[int]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": N_TOKENS,
        "stream": True,
    }
    records = await read_events(port, "/v1/chat/completions", body)
    return [r.at_ns for r in records if r.data["choices"][0]["delta"].get("content")]


@contextlib.contextmanager
def llama_cpp_server(path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run llama-cpp-python's server on path."""
    port, n_threads = free_port(), str(hardware.this_machine().default_threads)
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(path), "--port", str(port)]
    command += ["--n_ctx", "1024", "--n_threads", n_threads, "--n_threads_batch", n_threads]
    # By default a new request ends the one that is running.
    command += ["--interrupt_requests", "false", "--verbose", "false"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/v1/models")
                break
            time.sleep(0.1)
        yield process, port
    finally:
        process.terminate()
        process.wait()


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


if __name__ == "__main__":
    main()
