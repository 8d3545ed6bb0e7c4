"""`headrace bench MODEL`: how fast a model runs here, as a table or as JSON.

What is measured, and what is inside the timed windows, is said in measuring.py. With --baseline
plain llama.cpp is measured beside it, under the memory limit that headrace keeps.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from headrace.config import Settings
from headrace.config.settings import FlagParser, resolve
from headrace.config.units import format_bytes
from headrace.engine.errors import EngineError, InvalidRequest
from headrace.engine.hardware import this_machine
from headrace.engine.library import Model
from headrace.engine.loading import budget_bytes
from headrace.engine.memory import this_memory
from headrace.engine.placement import plan_load
from headrace.server import log
from headrace.server.commands import bench_report
from headrace.server.commands.baseline import measure_apart
from headrace.server.commands.bench_report import Baseline, Report
from headrace.server.commands.measuring import Job, Measurement, measure
from headrace.server.commands.memory_limit import memory_limit
from headrace.server.commands.progress import say

SETTINGS = ("memory", "vram", "mode", "threads")
# Of a model this many times as large as the memory, nearly all is read for each token.
_FAR = 2


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the command line asks for."""

    model: Path
    settings: Settings
    n_prompt: int
    n_generate: int
    n_runs: int
    has_baseline: bool
    is_forced: bool
    is_json: bool

    @property
    def limit_bytes(self) -> int | None:
        """What all of a process may take that keeps to the budget asked for; None: no budget."""
        return self.settings.memory or None


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Measure what arguments ask for and print it; return the exit status.

    Raises:
        SettingsError: a flag is wrong.
        EngineError: the model, or the baseline, can't be measured.
    """
    wanted = _parse(arguments, environ)
    log.configure("warning", is_coloured=sys.stderr.isatty() and not environ.get("NO_COLOR"))
    model = Model.open(wanted.model)
    if wanted.has_baseline and not wanted.is_forced:
        _refuse_far_too_large(model, wanted.limit_bytes)
    job = _job(wanted, model)
    try:
        ours = measure(job, say)
        baseline = _baseline(job, model, ours, wanted.limit_bytes) if wanted.has_baseline else None
    finally:
        say("")
    report = Report(
        version=importlib.metadata.version("headrace"),
        model=str(model.name),
        size_bytes=model.size_bytes,
        quantization=model.details.quantization_level,
        n_threads=job.load.n_threads,
        n_runs=job.n_runs,
        headrace=ours,
        baseline=baseline,
    )
    if wanted.is_json:
        print(msgspec.json.encode(report).decode())
    else:
        bench_report.show(report, Console())
    if baseline is not None and baseline.measurement is None:
        raise EngineError(baseline.note)
    return 0


def _job(wanted: _Wanted, model: Model) -> Job:
    # A prompt and a token, or a token and all that it leads to, and never quite full.
    n_ctx = max(wanted.n_prompt, wanted.n_generate + 1) + 2
    settings = replace(wanted.settings, context=n_ctx, parallel=1)
    load = plan_load(model, settings, this_machine())
    # All loads have the same budget: what is available changes from one to the next.
    load = msgspec.structs.replace(load, memory_bytes=budget_bytes(load))
    return Job(
        load=load, files=tuple(str(file.path) for file in model.header.files),
        n_prompt=wanted.n_prompt, n_generate=wanted.n_generate, n_runs=wanted.n_runs,
    )  # fmt: skip


def _refuse_far_too_large(model: Model, limit_bytes: int | None) -> None:
    """Raise InvalidRequest if plain llama.cpp would do little else than read the model."""
    there = this_memory().available_bytes
    if limit_bytes is not None:
        there = min(there, limit_bytes)
    if model.size_bytes > _FAR * there:
        raise InvalidRequest(
            f"{model.path}: has {format_bytes(model.size_bytes)}, plain llama.cpp would have"
            f" {format_bytes(there)} for it and read most of it for each token;"
            " --force measures that all the same"
        )


def _baseline(job: Job, model: Model, ours: Measurement, limit_bytes: int | None) -> Baseline:
    """Measure plain llama.cpp, in limit_bytes of memory if such a limit can be set.

    It repacks a model that headrace holds whole, as is its default. One that is streamed it only
    maps: repacked copies can't be dropped and read again, so they would get it killed.
    """
    load = msgspec.structs.replace(
        # The kernel alone limits it: nothing is planned.
        job.load, mode="full-resident", memory_bytes=job.load.memory_bytes + 2 * model.size_bytes
    )  # fmt: skip
    plain = msgspec.structs.replace(job, load=load, repacks=ours.mode == "full-resident")
    with contextlib.ExitStack() as stack:
        group, limited, note = None, None, "headrace had none either"
        if limit_bytes is not None:
            try:
                group = stack.enter_context(memory_limit(limit_bytes))
                limited, note = limit_bytes, ""
            except OSError as error:
                note = f"which can't be set: {error.filename}: {str(error.strerror).lower()}"
        try:
            theirs = measure_apart(plain, group, say)
        except EngineError as error:
            return Baseline(measurement=None, ratios={}, limit_bytes=limited, note=str(error))
    compared = bench_report.ratios(ours, theirs)
    return Baseline(measurement=theirs, ratios=compared, limit_bytes=limited, note=note)


def _parse(arguments: Sequence[str], environ: Mapping[str, str]) -> _Wanted:
    parser = FlagParser("headrace bench", "[flags] MODEL", "Measure how fast a model runs here.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument("--baseline", action="store_true", help="measure plain llama.cpp beside it")
    parser.add_argument(
        "--force", action="store_true", help="measure it though it must read most of the model"
    )
    for flag, default, meaning in (
        ("-p", 512, "tokens of the prompt"),
        ("-n", 64, "tokens to generate"),
        ("-r", 3, "runs of each test"),
    ):
        text = f"{meaning} (default {default})"
        parser.add_argument(flag, type=_count, metavar="N", default=default, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_settings(SETTINGS)
    found = vars(parser.parse_args(arguments))
    settings, _ = resolve(found, environ)
    return _Wanted(
        found["model"], settings, found["p"], found["n"], found["r"], found["baseline"],
        found["force"], found["json"],
    )  # fmt: skip


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ArgumentTypeError(f"{text} is too few, expected 1 or more")
    return count
