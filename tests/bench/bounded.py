"""A server within its memory for ten minutes: peaks, limit hits, kills, and bytes written.

Needs root, a cgroup memory controller and the models of streaming.py (the same folder argument).
Each model is served in a cgroup of its budget and a margin for two interpreters, and asked without
a pause; both at the same time, since it is not speed that is measured.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

import psutil
from big_models import DENSE, MOE, build_big
from cgroup import MIB, Cgroup
from reporting import report
from serving import serve, stream

# The server's interpreter and the engine's.
MARGIN_MIB = 256
LIMITS_MIB = {"moe": 4200, "dense": 3072}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    threads = [
        threading.Thread(target=run, args=(build_big(shape, arguments.folder), shape.name,
                                           arguments.minutes))
        for shape in (MOE, DENSE)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(path: Path, name: str, minutes: float) -> None:
    """Serve one model for so long and report what it took."""
    limit_mib = LIMITS_MIB[name]
    group = Cgroup(limit_mib * MIB, name)
    launcher = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.folder / "cgroup.procs")]
    launcher += [sys.executable, "-m", "headrace.server"]
    flags = ("--memory", f"{limit_mib - MARGIN_MIB}MiB", "--context", "2048", "--parallel", "2")
    n_tokens = n_answers = 0
    anonymous: list[float] = []
    try:
        # The log's lines would be the only bytes written.
        with serve(path, Path("/dev/null"), *flags, launcher=launcher) as server:
            (engine,) = server.engines()
            written = engine.io_counters().write_bytes
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                question = f"Question {n_answers}: {'what is a river, and why? ' * 20}"
                options = {"num_predict": 48, "seed": n_answers}
                body = {"model": server.names()[0], "prompt": question, "options": options}
                last = stream(server.url, "/api/generate", body, timeout_s=900)[-1].data
                n_answers += 1
                n_tokens += last["prompt_eval_count"] + last["eval_count"]
                anonymous.append(anonymous_mib(engine))
            written = engine.io_counters().write_bytes - written
        figures = group.figures()
    finally:
        group.remove()
    report(
        f"{name} in {limit_mib} MiB for {minutes:g} minutes, anonymous memory of the engine",
        anonymous, "MiB", budget_mib=limit_mib - MARGIN_MIB, written_bytes=written,
        n_answers=n_answers, n_tokens=n_tokens, **figures,
    )  # fmt: skip


def anonymous_mib(process: psutil.Process) -> float:
    """Return the anonymous memory of a process as it is now."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no RssAnon in /proc/PID/status, expected Linux 4.5 or later")


if __name__ == "__main__":
    main()
