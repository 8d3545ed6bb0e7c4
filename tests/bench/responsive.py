"""How long /api/tags and /api/show take while the engine decodes eight streams.

Timed from sending the request to having the whole answer, one at a time, on a connection that
is kept. Wanted: under 50 ms, all of them.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from reporting import report, smollm2
from serving import serve, stream

N_STREAMS = 8
N_REQUESTS = 60


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(smollm2(), Path(folder, "log"), "--parallel", "8", "--context", "1024") as server,
        ThreadPoolExecutor(N_STREAMS) as pool,
        httpx.Client(base_url=server.url) as client,
    ):
        name = server.names()[0]
        body = {"model": name, "prompt": "Count to a thousand.", "options": {"num_predict": 500}}
        streams = [pool.submit(stream, server.url, "/api/generate", body) for _ in range(N_STREAMS)]
        time.sleep(1)
        times: dict[str, list[float]] = {"/api/tags": [], "/api/show": []}
        for _ in range(N_REQUESTS):
            for path, found in times.items():
                started = time.perf_counter()
                if path == "/api/tags":
                    client.get(path).raise_for_status()
                else:
                    client.post(path, json={"model": name}).raise_for_status()
                found.append((time.perf_counter() - started) * 1e3)
        n_running = sum(not running.done() for running in streams)
    for path, found in times.items():
        report(f"{path} beside {n_running} running streams", found, "ms", wanted=50)


if __name__ == "__main__":
    main()
