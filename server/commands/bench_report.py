"""What bench says: the object of --json, and the table for people. Knows no engine."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.config.units import format_bytes
from headrace.server.announcement import describe_speed
from headrace.server.commands.measuring import Measurement, Spread


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Plain llama.cpp beside headrace."""

    measurement: Measurement | None
    """None: it could not be measured."""
    ratios: dict[str, float]
    """headrace's median speed over its, by test and start, such as "tg64 warm"."""
    limit_bytes: int | None
    """Its memory limit; None: the machine's memory."""
    note: str
    """Why it has no limit, or could not be measured; "" if neither."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that bench finds; sizes in bytes, times in seconds."""

    version: str
    model: str
    size_bytes: int
    quantization: str
    n_threads: int
    n_runs: int
    headrace: Measurement
    baseline: Baseline | None


def ratios(ours: Measurement, theirs: Measurement) -> dict[str, float]:
    """Return how many times as fast ours is as theirs, by test and start."""
    return {
        name: speed.median / theirs.tokens_per_s[name].median
        for name, speed in ours.tokens_per_s.items()
    }


def show(report: Report, console: Console) -> None:
    """Print report as a table, with what it is of above and below."""
    ours, baseline = report.headrace, report.baseline
    theirs = baseline.measurement if baseline is not None else None
    size = f"{format_bytes(report.size_bytes)}, {report.quantization}"
    console.print(f"{report.model}: {size}, {ours.mode}", highlight=False)
    table = Table("test")
    table.add_column("headrace", justify="right")
    if baseline is not None and theirs is not None:
        table.add_column("llama.cpp mmap", justify="right")
        table.add_column("ratio", justify="right")
        table.add_row("load, s", _shown(ours.load_s), _shown(theirs.load_s), "")
        for name, spread in ours.tokens_per_s.items():
            other, ratio = theirs.tokens_per_s[name], baseline.ratios[name]
            table.add_row(name, _shown(spread), _shown(other), f"{ratio:.2f}")
    else:
        table.add_row("load, s", _shown(ours.load_s))
        for name, spread in ours.tokens_per_s.items():
            table.add_row(name, _shown(spread))
    console.print(table)
    runs = f"tokens/s with {report.n_threads} threads; median (lowest to highest) of"
    console.print(f"{runs} {report.n_runs} runs", highlight=False)
    if ours.forecast is not None:
        console.print(f"forecast: {describe_speed(ours.forecast)}", highlight=False)
    if baseline is not None and theirs is not None:
        limit = baseline.limit_bytes
        memory = f"no memory limit, {baseline.note}" if limit is None else format_bytes(limit)
        console.print(f"llama.cpp had {memory}", highlight=False)


def _shown(spread: Spread) -> str:
    return f"{_digits(spread.median)} ({_digits(spread.lowest)} to {_digits(spread.highest)})"


def _digits(figure: float) -> str:
    """Return figure to three digits or so, never in powers of ten."""
    return f"{figure:.{0 if figure >= 100 else 1 if figure >= 10 else 2}f}"
