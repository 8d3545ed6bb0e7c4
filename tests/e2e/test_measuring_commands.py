"""`headrace profile` and `headrace iobench` on a real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import psutil
import pytest
import streaming_models

from headrace.engine.profile import DiskProfile
from headrace.server.commands import iobench, profile

pytestmark = pytest.mark.e2e

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a cache of its own and an 80-column terminal."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "COLUMNS": "80"}


@pytest.fixture(scope="module")
def run(environment: dict[str, str]) -> Run:
    """Return a function that runs a command and returns it with what it printed."""

    def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), env=environment | variables, capture_output=True, text=True
        )

    return run


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "headrace.server", *map(str, arguments)]


def checked(text: str, report: type) -> Any:
    """Return the object that text holds, which is as report's schema says."""
    value = json.loads(text)
    jsonschema.validate(value, msgspec.json.schema(report))
    assert text.count("\n") == 1
    return value


@pytest.fixture(scope="module")
def measured(run: Run, smollm2_path: Path) -> Any:
    """What `profile MODEL --json` printed."""
    done = run("profile", smollm2_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return checked(done.stdout, profile.Report)


def test_profile_of_a_model_has_its_types_and_its_disk(measured: Any, smollm2_path: Path) -> None:
    found = measured["profile"]
    assert [kernel["type"] for kernel in found["kernels"]] == ["Q4_1", "Q8_0"]
    device = smollm2_path.stat().st_dev
    assert [disk["device"] for disk in found["disks"]] == [f"{os.major(device)}:{os.minor(device)}"]
    sizes = {point["request_bytes"] for point in found["disks"][0]["random"]}
    assert sizes == {1 << 16, 1 << 18, 1 << 20}  # of 4 MiB the file holds too few
    assert measured["memory"]["physical_bytes"] == psutil.virtual_memory().total
    assert Path(measured["kept_in"]).exists()


def test_profile_is_measured_once(run: Run, measured: Any, smollm2_path: Path) -> None:
    again = checked(run("profile", smollm2_path, "--json").stdout, profile.Report)
    assert again["profile"] == measured["profile"]


@pytest.mark.usefixtures("measured")
def test_profile_fits_a_narrow_terminal(run: Run, smollm2_path: Path) -> None:
    done = run("profile", smollm2_path, COLUMNS="40")
    assert done.returncode == 0
    assert "Q4_1" in done.stdout
    assert "in order 64 KiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 40


@pytest.mark.usefixtures("measured")
def test_profile_can_be_printed_without_unicode(run: Run, smollm2_path: Path) -> None:
    done = run("profile", smollm2_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_reader_who_leaves_ends_the_command_without_a_word(
    environment: dict[str, str], smollm2_path: Path, flags: tuple[str, ...]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            command("profile", smollm2_path, *flags),
            env=environment, stdout=pipe, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_interrupt_ends_the_command_and_the_measuring(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    environment = environment | {"XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.Popen(
        command("profile"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    while not (children := psutil.Process(process.pid).children()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert (process.returncode, output, errors) == (128 + signal.SIGINT, "", "")
    # One that has ended may not have been buried yet, by whoever does that for orphans here.
    ended = (not c.is_running() or c.status() == psutil.STATUS_ZOMBIE for c in children)
    assert all(ended)
    assert not (tmp_path / "headrace").exists()


def test_iobench_tells_how_near_to_the_best_streaming_reads(run: Run, smollm2_path: Path) -> None:
    done = run("iobench", smollm2_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = checked(done.stdout, iobench.Report)
    engine, best = report["engine"], report["best"]
    # Dense: pieces in order, as many in flight as the disk asks for.
    assert (engine["order"], engine["request_bytes"], engine["depth"]) == (
        "sequential",
        1 << 20,
        in_flight(report, 1 << 20),
    )
    assert report["part_of_best"] == engine["bytes_per_s"] / best["bytes_per_s"] <= 1
    assert report["too_large_bytes"] == [4 << 20]
    assert report["file_bytes"] == smollm2_path.stat().st_size


def test_iobench_fits_a_narrow_terminal(run: Run, smollm2_path: Path) -> None:
    done = run("iobench", smollm2_path, COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.replace(str(smollm2_path), "MODEL").splitlines()
    assert any("streaming: 1 MiB in order" in line for line in lines)
    assert max(len(line) for line in lines if "/" not in line) <= 40


def in_flight(report: dict[str, Any], request_bytes: int) -> int:
    """Return how many reads of that size the measured disk asks for."""
    return msgspec.convert(report["disk"], DiskProfile).reads_in_flight(request_bytes)


def test_experts_are_read_in_slices_at_random(tmp_path: Path, run: Run) -> None:
    path = streaming_models.build(streaming_models.QWEN3MOE, tmp_path)
    report = checked(run("iobench", path, "--json").stdout, iobench.Report)
    # 96 rows of 256 weights in Q4_0: 18 bytes for 32.
    slice_bytes = 96 * 256 // 32 * 18
    expected = ("random", slice_bytes, in_flight(report, slice_bytes))
    engine = report["engine"]
    assert (engine["order"], engine["request_bytes"], engine["depth"]) == expected


@pytest.mark.parametrize("name", ["profile", "iobench"])
def test_model_that_is_missing_is_one_line_and_1(run: Run, tmp_path: Path, name: str) -> None:
    done = run(name, tmp_path / "no.gguf")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"headrace: error: {tmp_path / 'no.gguf'}: ")


@pytest.mark.parametrize("arguments", [("iobench",), ("iobench", "a", "b"), ("profile", "--fast")])
def test_wrong_command_line_is_2_with_nothing_on_stdout(
    run: Run, arguments: tuple[str, ...]
) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: headrace" in done.stderr
