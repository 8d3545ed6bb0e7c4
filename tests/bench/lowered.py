"""A quarter of a server's memory limit is taken away while it answers: text, speed, kills, log.

Needs root, a cgroup memory controller and the models of streaming.py (the same folder argument).
The speed to come back to is that of a server that was started in the lower limit. Recovered is the
speed from the second on from which every five seconds have three quarters of that. Wanted: the same
text, no kill, recovered within 30 s, one line in the log.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from big_models import DENSE, MOE, build_big
from cgroup import MIB, Cgroup
from reporting import report
from serving import Record, Server, serve, stream, text_of

LIMITS_MIB = {"moe": 4096, "dense": 3072}
# Some thirty seconds of an answer come after the limit was lowered.
N_TOKENS = {"moe": 300, "dense": 80}
# Of an answer, before the limit is lowered.
UNDISTURBED_S = 5.0
WINDOW_S = 5
# A limit that does not fit is refused; so long it is tried again.
PATIENCE_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(LIMITS_MIB))
    parser.add_argument("--limit", type=int, help="MiB; instead of the model's own")
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # no run knows the experts of another
        for shape in (MOE, DENSE):
            if arguments.only in (None, shape.name):
                path = build_big(shape, arguments.folder)
                limit_mib = arguments.limit or LIMITS_MIB[shape.name]
                run(shape.name, path, limit_mib, arguments.flags, Path(cache) / "log")


def run(name: str, path: Path, limit_mib: int, flags: Sequence[str], log: Path) -> None:
    """Report what lowering the limit does to one model."""
    n_tokens = N_TOKENS[name]
    with limited(path, limit_mib, flags, log) as (server, group):
        answer(server, 1)  # from now on the prompt's beginning is cached, in both answers
        undisturbed = text_of(answer(server, n_tokens))
        lowering = Lowering(group, limit_mib * MIB * 3 // 4)
        records = answer(server, n_tokens)
        lowering.join()
        time.sleep(4)  # what was done is said when it is over
        figures: dict[str, Any] = {
            "same_text": text_of(records) == undisturbed,
            "engines": len(server.engines()),
            "lines": server.log().count("memory is short"),
            "line": next((s for s in server.log().splitlines() if "memory is short" in s), ""),
            **group.figures(),
        }
    with limited(path, limit_mib * 3 // 4, flags, log) as (server, _):
        answer(server, n_tokens // 4)
        reference = speed_of(answer(server, n_tokens // 4))
    speeds = by_second(records, lowering.began_s)
    report(
        f"{name}, {limit_mib} MiB lowered by a quarter: until the speed is back",
        [recovery_s(speeds, 0.75 * reference)], "s", lowered_mib=limit_mib * 3 // 4,
        accepted_s=lowering.took_s, started_lower_tokens_per_s=round(reference, 2),
        before_tokens_per_s=round(speed_before(records, lowering.began_s), 2),
        tokens_each_second=speeds, wanted=30, **figures,
    )  # fmt: skip


@contextlib.contextmanager
def limited(
    path: Path, limit_mib: int, flags: Sequence[str], log: Path
) -> Iterator[tuple[Server, Cgroup]]:
    """Run a server in a cgroup of its own, without --memory unless flags say so."""
    group = Cgroup(limit_mib * MIB)
    launcher = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.folder / "cgroup.procs")]
    launcher += [sys.executable, "-m", "headrace.server"]
    try:
        with serve(path, log, *flags, launcher=launcher) as server:
            yield server, group
    finally:
        group.remove()


class Lowering(threading.Thread):
    """Lowers the limit of a group in a while, and again as long as the kernel refuses it."""

    def __init__(self, group: Cgroup, n_bytes: int) -> None:
        super().__init__()
        self.began_s = time.monotonic() + UNDISTURBED_S
        self.took_s: float | None = None
        """None: it was refused to the end."""
        name = "memory.max" if group.is_v2 else "memory.limit_in_bytes"
        self._limit, self._n_bytes = group.folder / name, n_bytes
        self.start()

    def run(self) -> None:
        time.sleep(UNDISTURBED_S)
        while (seconds := time.monotonic() - self.began_s) < PATIENCE_S:
            with contextlib.suppress(OSError):
                self._limit.write_text(str(self._n_bytes))
                self.took_s = round(seconds, 1)
                return
            time.sleep(0.2)


def answer(server: Server, n_tokens: int) -> list[Record]:
    """Return the records of an answer that has text."""
    options = {"temperature": 0, "num_predict": n_tokens}
    prompt = "The tide comes in twice a day, and"
    body = {"model": server.names()[0], "prompt": prompt, "options": options}
    records = stream(server.url, "/api/generate", body, timeout_s=900)
    # A long wait is filled with empty records.
    return [record for record in records if record.data["response"] or record.data["done"]]


def speed_of(records: Sequence[Record]) -> float:
    last = records[-1].data
    return float(last["eval_count"] / (last["eval_duration"] / 1e9))


def speed_before(records: Sequence[Record], at_s: float) -> float:
    """Return the tokens/s of an answer up to at_s."""
    n = sum(record.at < at_s for record in records)
    return (n - 1) / (at_s - records[0].at)


def by_second(records: Sequence[Record], start_s: float) -> list[int]:
    """Return the tokens that came in each whole second from start_s on."""
    n_seconds = int(records[-1].at - start_s)
    counts = [0] * n_seconds
    for record in records:
        second = int(record.at - start_s)
        if record.at >= start_s and second < n_seconds:
            counts[second] += 1
    return counts


def recovery_s(speeds: Sequence[int], wanted: float) -> float:
    """Return the second from which every window of speeds has wanted tokens/s; inf if none does."""
    n_windows = len(speeds) - WINDOW_S + 1
    slow = [i for i in range(n_windows) if sum(speeds[i : i + WINDOW_S]) < wanted * WINDOW_S]
    if slow and slow[-1] == n_windows - 1:
        return float("inf")
    return slow[-1] + 1.0 if slow else 0.0


if __name__ == "__main__":
    main()
