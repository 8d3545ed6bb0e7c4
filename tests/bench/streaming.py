"""Models larger than memory: headrace's streaming against llama.cpp's mmap in the same cgroup.

Needs root, cgroup v1 or v2 with the memory controller, some 13 GB of disk (the first argument or
HEADRACE_BENCH_MODELS names the folder) and some 20 minutes. Runs are interleaved; the file's page
cache is dropped before each; the disk's read-ahead is set for each and put back afterwards. Wanted:
the ratios of issue 3.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from big_models import DENSE, MOE, BigShape, build_big
from cgroup import MIB, Cgroup, drop_cache
from reporting import ROOT, report

from headrace.engine.openmp import openmp_environment

RUN = ROOT / "tests" / "support" / "streaming_run.py"
# What the interpreter, its modules and llama.cpp's code take beside what is in the budget.
INTERPRETER_MIB = 140
# Linux's own read-ahead, at which prompts are compared.
ORDINARY_KIB = 128
# Of the reads that speed is compared with: two batches at a time, so that no thread waits.
N_PIECES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One comparison: a model in a limit, and the ratios to mmap that are wanted."""

    shape: BigShape
    mode: str
    limit_mib: int
    wanted: dict[int, float]
    """By read-ahead in KiB."""
    n_tokens: int


CASES = (
    Case(MOE, "expert-streaming", 4200, {128: 3.0, 8192: 20.0}, 64),
    Case(DENSE, "dense-ffn-streaming", 3072, {128: 5.5, 8192: 3.0}, 16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("HEADRACE_BENCH_MODELS", str(Path.home() / ".cache/headrace-bench"))
    parser.add_argument("folder", nargs="?", type=Path, default=Path(default))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, help="smaller models, for trying it out")
    parser.add_argument("--only", choices=["moe", "dense"])
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt; 0: none")
    parser.add_argument("--build", action="store_true", help="only make the models")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if arguments.only not in (None, case.shape.name):
            continue
        if arguments.layers:
            case = scaled(case, arguments.layers)
        path = build_big(case.shape, arguments.folder)
        if arguments.build:
            continue
        for read_ahead_kib, wanted in case.wanted.items():
            with read_ahead(path, read_ahead_kib):
                compare(case, path, read_ahead_kib, wanted, arguments.runs)
                if arguments.prefill and read_ahead_kib == ORDINARY_KIB:
                    compare_prefill(case, path, read_ahead_kib, arguments.prefill, arguments.runs)


def scaled(case: Case, n_layer: int) -> Case:
    """Return case with fewer layers and as much less memory."""
    share = n_layer / case.shape.n_layer
    shape = dataclasses.replace(case.shape, n_layer=n_layer)
    limit_mib = int(case.limit_mib * share) + 2 * INTERPRETER_MIB
    return dataclasses.replace(case, shape=shape, limit_mib=limit_mib)


def compare(case: Case, path: Path, read_ahead_kib: int, wanted: float, n_runs: int) -> None:
    """Report the decode speed of both, and their ratio, over interleaved runs."""
    runs: dict[str, list[dict[str, Any]]] = {"mmap": [], "stream": []}
    disk = []
    for _ in range(n_runs):
        for how in ("mmap", "stream"):
            n_tokens = case.n_tokens if how == "stream" else max(case.n_tokens // 8, 4)
            runs[how].append(run(case, path, how, "--warm", "8", "--tokens", str(n_tokens)))
        disk.append(direct_mb_per_s(path))
    speeds = {how: [r["tokens_per_s"] for r in results] for how, results in runs.items()}
    what = f"{case.shape.name} in {case.limit_mib} MiB, read-ahead {read_ahead_kib} KiB, decode"
    for how in ("mmap", "stream"):
        report(f"{what}, {how}", speeds[how], "tokens/s", last=runs[how][-1])
    ratio = statistics.median(speeds["stream"]) / statistics.median(speeds["mmap"])
    report(f"{what}, stream / mmap", [ratio], "ratio", wanted=wanted)
    report(f"{case.shape.name}, direct 1 MiB reads of the same file", disk, "MB/s")
    share = [r["read_mb_per_busy_s"] / d for r, d in zip(runs["stream"], disk, strict=True)]
    report(f"{what}, bandwidth while reading / direct reads", share, "ratio", wanted=0.9)
    cpu = [r["io_cpu_s_per_gb"] for r in runs["stream"]]
    report(f"{what}, CPU of the reading threads", cpu, "s/GB")


def compare_prefill(
    case: Case, path: Path, read_ahead_kib: int, n_tokens: int, n_runs: int
) -> None:
    """Report the speed of one prompt on both, and their ratio."""
    speeds: dict[str, list[float]] = {"mmap": [], "stream": []}
    for _ in range(n_runs):
        for how, found in speeds.items():
            result = run(case, path, how, "--prefill", str(n_tokens), "--tokens", "1")
            found.append(result["prompt_tokens_per_s"])
    what = f"{case.shape.name} in {case.limit_mib} MiB, read-ahead {read_ahead_kib} KiB"
    for how, found in speeds.items():
        report(f"{what}, prefill of {n_tokens}, {how}", found, "tokens/s")
    ratio = statistics.median(speeds["stream"]) / statistics.median(speeds["mmap"])
    report(f"{what}, prefill, stream / mmap", [ratio], "ratio", wanted=2.0)


def run(case: Case, path: Path, how: str, *flags: str) -> dict[str, Any]:
    """Run one measurement in a cgroup of its own and return its figures."""
    drop_cache(path)
    group = Cgroup(case.limit_mib * MIB)
    memory = (case.limit_mib - INTERPRETER_MIB) * MIB
    import llama_cpp

    environ = {
        **os.environ,
        **openmp_environment(Path(llama_cpp.__file__).parent),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, str(RUN), str(path), how, "--mode", case.mode]
    try:
        done = subprocess.run(
            [*command, "--memory", str(memory), *flags], capture_output=True, text=True,
            env=environ, preexec_fn=group.enter, check=False,
        )  # fmt: skip
        figures = group.figures()
    finally:
        group.remove()
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}, {figures}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | figures


def direct_mb_per_s(path: Path, n_bytes: int = 2 << 30) -> float:
    """Return the speed of direct reads of 1 MiB with the stream's threads, never out of work.

    They go to memory like the stream's: on 2 MiB pages, and touched before.
    """
    from headrace.engine.plan import N_IO_THREADS
    from headrace.native import Reader

    memory = mmap.mmap(-1, 2 * N_PIECES * MIB + 2 * MIB, flags=mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:] = bytes(len(view))
    with Reader(path, n_threads=N_IO_THREADS) as reader, ThreadPoolExecutor(2) as pool:
        n_bytes = min(n_bytes, reader.size)
        batches = iter(range(0, n_bytes, N_PIECES * MIB))

        def read(place: int) -> int:
            starts = range(place * N_PIECES, (place + 1) * N_PIECES)
            buffers = [view[i * MIB : (i + 1) * MIB] for i in starts]
            return sum(
                sum(reader.read_into([(at + i * MIB, b) for i, b in enumerate(buffers)]))
                for at in batches
            )

        started = time.perf_counter()
        n_read = sum(pool.map(read, range(2)))
        return n_read / (time.perf_counter() - started) / 1e6


@contextlib.contextmanager
def read_ahead(path: Path, n_kib: int) -> Iterator[None]:
    """Set the read-ahead of the disk that path is on, and put it back."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (block / "partition").exists():
        block = block.parent
    setting = block / "queue" / "read_ahead_kb"
    before = setting.read_text()
    setting.write_text(str(n_kib))
    try:
        yield
    finally:
        setting.write_text(before)


if __name__ == "__main__":
    main()
