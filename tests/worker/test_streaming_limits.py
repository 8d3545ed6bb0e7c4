"""What a streamed model does when the system refuses descriptors, threads or memory for it.

Each limit is set in a process of its own. The model is refused with the reason, nothing of it stays
open even while the error is kept, and once the limit is gone the same process loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from child import run_python

Built = Callable[[str], Path]

_LOADING = """
import os, sys
from dataclasses import replace
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, RLIMIT_NOFILE, getpagesize, getrlimit, setrlimit

import streamed
from waiting import wait_until

from headrace.engine import gguf, llama
from headrace.engine.errors import ModelUnusable
from headrace.engine.streaming import WeightStream

def load(plan, **options):
    stream = WeightStream(header, plan, llama.streaming_functions(), **options)
    llama.Model(path, stream=stream).close()

def held():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

def attempt(plan, which, limit, **options):
    n_held, before = held(), getrlimit(which)
    setrlimit(which, (limit, before[1]))
    try:
        load(plan, **options)
        outcome = "loaded"
    except ModelUnusable as error:
        outcome = error  # and with it the frames that it came through
    finally:
        setrlimit(which, before)
    wait_until(lambda: held() == n_held, f"back to {n_held} descriptors and threads")
    print(outcome)

def in_use():
    return int(open("/proc/self/statm").read().split()[0]) * getpagesize()

def enlarge(n):
    if plan.pool_records:
        return replace(plan, pool_records=(n,))
    return replace(plan, n_ring_slots=n)

llama.start_backend()
path = Path(sys.argv[1])
header = gguf.read_model(path)
plan = streamed.plan(path, 0)
load(plan)
"""


@pytest.mark.parametrize("kind", ["split_dense", "split_moe"])
def test_descriptors_that_run_out_are_told_with_the_file_that_got_none(
    kind: str, built: Built
) -> None:
    first = built(kind)
    files = sorted(first.parent.glob(f"{kind}-*.gguf"))
    code = """
next_free = os.dup(0)
os.close(next_free)
for n in range(int(sys.argv[2]) + 2):
    attempt(plan, RLIMIT_NOFILE, next_free + n)
"""
    # The header is read again before all files are opened; then one is for the loader's memory.
    refused = [first, *files[1:], first]
    expected = [f"{file}: can't be opened for streaming: too many open files" for file in refused]
    lines = run_python(_LOADING + code, first, len(files)).splitlines()
    assert len(files) > 1
    assert lines == [*expected, "loaded"]


@pytest.mark.parametrize("kind", ["dense", "qwen3moe"])
def test_memory_that_is_refused_is_told(kind: str, built: Built) -> None:
    path = built(kind)
    code = """
attempt(plan, RLIMIT_AS, in_use() + (100 << 20), n_threads=64)
attempt(enlarge(50_000), RLIMIT_AS, in_use() + (512 << 20))
attempt(plan, RLIMIT_AS, RLIM_INFINITY)
"""
    first, *others = run_python(_LOADING + code, path).splitlines()
    # A thread more, or what those that have started take for themselves: either may come first.
    reasons = ("resource temporarily unavailable", "cannot allocate memory")
    assert first in [f"{path}: can't be opened for streaming: {reason}" for reason in reasons]
    assert others == [f"{path}: no memory to stream weights: cannot allocate memory", "loaded"]


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1",
    reason="this system never refuses memory",
)
@pytest.mark.parametrize("kind", ["dense", "qwen3moe"])
def test_more_memory_than_the_machine_has_is_refused_and_not_touched(
    kind: str, built: Built
) -> None:
    path = built(kind)
    n_bytes = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    code = """
open("/proc/self/oom_score_adj", "w").write("1000")  # should it be touched: this one is killed
attempt(enlarge(int(sys.argv[2])), RLIMIT_AS, RLIM_INFINITY)
attempt(enlarge((1 << 32) - 1), RLIMIT_AS, RLIM_INFINITY)
attempt(plan, RLIMIT_AS, RLIM_INFINITY)
"""
    refused = f"{path}: no memory to stream weights: cannot allocate memory"
    lines = run_python(_LOADING + code, path, n_bytes // 40_000).splitlines()
    assert lines == [refused, refused, "loaded"]
