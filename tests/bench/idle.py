"""CPU time of an idle server with a loaded model, server and engine process together.

After one request and a pause in which waiting threads may go to sleep. Wanted: under 1 % of a core.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx
import psutil
from reporting import report, smollm2
from serving import serve

N_RUNS = 3
WINDOW_S = 10.0
PAUSE_S = 2.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serve(smollm2(), Path(folder, "log")) as server:
        body = {"model": server.names()[0], "prompt": "hi", "options": {"num_predict": 8}}
        httpx.post(f"{server.url}/api/generate", json=body).raise_for_status()
        processes = [psutil.Process(server.process.pid), *server.engines()]
        time.sleep(PAUSE_S)
        shares = []
        for _ in range(N_RUNS):
            before = cpu_seconds(processes)
            time.sleep(WINDOW_S)
            shares.append(100 * (cpu_seconds(processes) - before) / WINDOW_S)
    report("CPU of an idle server", shares, "% of a core", wanted=1.0)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


if __name__ == "__main__":
    main()
