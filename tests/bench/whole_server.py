"""The whole server against the engine alone: speed with one and eight streams, latency per chunk.

Engine figure: the same requests through the same engine process, read from its socket by an
EngineClient in this process. Server figure: the same requests over HTTP. Runs are interleaved, on
one loaded model each; loading is outside the timed window, prompts are inside both. Latency: each
chunk carries the time at which the engine sent it; it ends when the client has the line.
Ratios wanted: 0.93; latency wanted: under 1 ms.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from raw_client import read_stream
from reporting import report, smollm2
from serving import Server, serve

from headrace.engine import hardware
from headrace.engine.client import EngineClient
from headrace.engine.messages import Done, Generate, Load, SamplingParams, Segment

N_TOKENS = 160
N_RUNS = 7
PROMPT = "Once upon a time, by the sea,"


async def engine_speed(client: EngineClient, n_streams: int) -> float:
    """Return tokens/s of n_streams equal requests to the engine process."""

    async def one() -> int:
        request = Generate(
            uid=client.next_uid(),
            prompt=(Segment(PROMPT, True),),
            sampling=SamplingParams(temperature=0),
            n_predict=N_TOKENS,
        )
        stream = client.submit(request)
        while not isinstance(event := await stream.next(), Done):
            pass
        return event.timings.n_generated

    started = time.perf_counter()
    n_tokens = sum(await asyncio.gather(*(one() for _ in range(n_streams))))
    return n_tokens / (time.perf_counter() - started)


async def server_speed(server: Server, body: dict[str, Any], n_streams: int) -> float:
    """Return tokens/s of n_streams equal requests over HTTP."""
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(read_stream(server.port, "/api/generate", body) for _ in range(n_streams))
    )
    n_tokens = sum(int(records[-1].data["eval_count"]) for records in answers)
    return n_tokens / (time.perf_counter() - started)


async def main() -> None:
    path, n_threads = smollm2(), hardware.this_machine().default_threads
    load = Load(
        path=str(path),
        name="bench",
        n_ctx=1024,
        n_slots=8,
        n_batch=512,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        log_level="warning",
    )
    flags = ("--parallel", "8", "--context", "1024")
    with tempfile.TemporaryDirectory() as folder:
        with serve(path, Path(folder, "log"), *flags) as server:
            name = server.names()[0]
            body = {
                "model": name,
                "prompt": PROMPT,
                "raw": True,
                "options": {"temperature": 0, "num_predict": N_TOKENS},
            }
            client = await EngineClient.start(load)
            for n_streams in (1, 8):
                ratios, speeds = [], []
                for _ in range(N_RUNS):
                    alone = await engine_speed(client, n_streams)
                    served = await server_speed(server, body, n_streams)
                    speeds.append(served)
                    ratios.append(served / alone)
                report(f"server, {n_streams} streams", speeds, "tokens/s")
                report(f"server / engine, {n_streams} streams", ratios, "ratio", wanted=0.93)
            await client.close()
        launcher = (sys.executable, "-m", "stamping_server")
        with serve(path, Path(folder, "log"), *flags, launcher=launcher) as server:
            for n_streams in (1, 8):
                report(
                    f"latency per chunk, {n_streams} streams, median of a run",
                    [await latency_ms(server, body, n_streams) for _ in range(N_RUNS)],
                    "ms",
                    wanted=1.0,
                )


async def latency_ms(server: Server, body: dict[str, Any], n_streams: int) -> float:
    """Return the median time from the engine's sending to the client's line, in ms."""
    answers = await asyncio.gather(
        *(read_stream(server.port, "/api/generate", body) for _ in range(n_streams))
    )
    delays = [
        record.at_ns - int(stamp)
        for records in answers
        for record in records
        for stamp in record.data["response"].split()
    ]
    return statistics.median(delays) / 1e6


if __name__ == "__main__":
    asyncio.run(main())
