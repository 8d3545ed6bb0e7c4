"""`headrace bench`: what it prints, and plain llama.cpp beside it. Never how fast anything is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import psutil
import pytest
from terminal import Terminal

from headrace.engine.errors import EngineError
from headrace.engine.messages import Load
from headrace.server.commands.baseline import measure_apart
from headrace.server.commands.bench_report import Report
from headrace.server.commands.measuring import Job
from headrace.server.commands.memory_limit import enter, memory_limit

pytestmark = pytest.mark.e2e

MIB = 1 << 20
QUICK = ("-p", "32", "-n", "4", "-r", "2")
TESTS = {"pp32 cold", "pp32 warm", "tg4 cold", "tg4 warm"}
Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bench(smollm2_path: Path, tmp_path: Path) -> Bench:
    """Run the command with flags on SmolLM2, or on another model."""

    def run(
        *flags: str, model: Path = smollm2_path, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headrace.server", "bench", str(model), *flags],
            env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path), **environ},
            capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip

    return run


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the object that the command printed, checked against the schema of a report."""
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(found, msgspec.json.schema(Report))
    return found


@pytest.fixture
def job(smollm2_path: Path) -> Job:
    load = Load(
        path=str(smollm2_path), name="smollm2", n_ctx=256, n_slots=1, n_batch=128, n_threads=1,
        n_threads_batch=1, mode="full-resident",
    )  # fmt: skip
    return Job(load=load, files=(str(smollm2_path),), n_prompt=32, n_generate=4, n_runs=1)


def test_json_has_every_test_cold_and_warm(bench: Bench) -> None:
    found = report(bench(*QUICK, "--json"))
    assert (found["model"], found["baseline"]) == ("SmolLM2-135M-Instruct.Q4_1:latest", None)
    ours = found["headrace"]
    assert ours["mode"] == "full-resident"
    assert set(ours["tokens_per_s"]) == TESTS
    for spread in ours["tokens_per_s"].values():
        assert len(spread["runs"]) == 2
        assert 0 < spread["lowest"] <= spread["median"] <= spread["highest"]
    assert len(ours["load_s"]["runs"]) == 4  # before each cold run of each test


def test_baseline_runs_in_the_budget_or_says_why_not(bench: Bench) -> None:
    flags = ("--mode", "dense-ffn-streaming", "--memory", "250MiB", "--threads", "1")
    found = report(bench(*QUICK, *flags, "--json", "--baseline"))
    assert found["headrace"]["mode"] == "dense-ffn-streaming"
    assert found["headrace"]["budget_bytes"] == 250 * MIB
    baseline = found["baseline"]
    assert baseline["measurement"]["mode"] == "full-resident"
    assert set(baseline["ratios"]) == set(baseline["measurement"]["tokens_per_s"]) == TESTS
    if can_limit():
        assert (baseline["limit_bytes"], baseline["note"]) == (250 * MIB, "")
    else:
        assert baseline["limit_bytes"] is None
        assert baseline["note"].startswith("which can't be set: ")


def test_table_fits_a_narrow_terminal(bench: Bench) -> None:
    done = bench(*QUICK, "-r", "1", "--baseline", COLUMNS="48")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 48
    assert "headrace" in done.stdout and "ratio" in done.stdout
    assert "no memory limit" in " ".join(lines)


def test_baseline_far_larger_than_its_memory_is_refused(
    bench: Bench, smollm2_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "large.gguf"
    shutil.copy(smollm2_path, path)
    os.truncate(path, 1024 * MIB)  # a hole that is in no tensor
    done = bench(*QUICK, "--baseline", "--memory", "200MiB", model=path)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert "has 1 GiB, plain llama.cpp would have 200 MiB" in line and "--force" in line


def test_test_that_no_context_holds_is_one_line_and_1(bench: Bench) -> None:
    done = bench("-p", "9000", "-n", "1", "-r", "1")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("headrace: error: prompt too long")


def test_interrupt_ends_the_baseline_too(smollm2_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.server", "bench", str(smollm2_path), *QUICK]
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    with Terminal([*command, "--baseline"], environ) as terminal:
        terminal.expect("plain llama.cpp: pp32 cold")
        [child] = psutil.Process(terminal.process.pid).children()
        terminal.type("\x03")
        assert terminal.wait() == 128 + signal.SIGINT
        assert "Traceback" not in terminal.output
        assert not child.is_running()


def test_error_of_the_baseline_comes_back(job: Job) -> None:
    missing = msgspec.structs.replace(job.load, path="/nosuch.gguf")
    with pytest.raises(EngineError, match=r"^plain llama\.cpp: /nosuch\.gguf: can't be read"):
        measure_apart(msgspec.structs.replace(job, load=missing), None, lambda text: None)


def test_baseline_that_its_limit_kills_is_told(job: Job) -> None:
    if not can_limit():
        pytest.skip("no memory cgroup can be made here")
    with memory_limit(30 * MIB) as group:
        with pytest.raises(EngineError, match="ended by SIGKILL"):
            measure_apart(job, group, lambda text: None)
    assert not group.exists()


def test_limit_holds_for_the_process_in_it_and_goes_with_it() -> None:
    if not can_limit():
        pytest.skip("no memory cgroup can be made here")
    with memory_limit(64 * MIB) as group:
        with subprocess.Popen(["sleep", "60"]) as process:
            enter(group, process.pid)
            assert (group / "cgroup.procs").read_text().split() == [str(process.pid)]
            process.kill()
        assert process.returncode == -signal.SIGKILL
    assert not group.exists()


def can_limit() -> bool:
    """Return whether this user may make memory cgroups here."""
    with contextlib.suppress(OSError), memory_limit(64 * MIB):
        return True
    return False
