"""`headrace iobench MODEL`: how fast the disk gives a file, and how near to that streaming gets.

A process of its own: it uses the engine's far side and is imported only when asked for.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from headrace.config.units import format_bytes
from headrace.engine.disk import DEPTHS, REQUEST_BYTES
from headrace.engine.disk_speed import PIECE_BYTES, Reads, measure_disk, measure_reads
from headrace.engine.gguf import read_model
from headrace.engine.profile import DiskPoint, DiskProfile
from headrace.engine.tensors import TensorTable, read_tensors
from headrace.server.commands.terminal import Terminal, print_json, speed

Order = Literal["sequential", "random"]


class ReadSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of reads and how fast it was."""

    order: Order
    request_bytes: int
    depth: int
    bytes_per_s: float

    def __str__(self) -> str:
        order = "in order" if self.order == "sequential" else "at random"
        return f"{format_bytes(self.request_bytes)} {order}, {self.depth} at once"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    path: str
    file_bytes: int
    disk: DiskProfile
    engine: ReadSpeed
    """As streaming this model would read it."""
    best: ReadSpeed
    part_of_best: float
    too_large_bytes: tuple[int, ...]
    """Sizes of requests that were not measured: the file holds too few of them."""


def main(arguments: Sequence[str]) -> int:
    """Measure reads of a model's file and print them; return the exit status.

    Raises:
        EngineError: the model can't be read.
    """
    wanted = _parse(arguments)
    header = read_model(wanted.model)
    file = max(header.files, key=lambda file: file.n_bytes)
    with _progress() as progress:
        task = progress.add_task("reading")
        disk = measure_disk(
            file.path, lambda done, total: progress.update(task, completed=done, total=total)
        )
        engine = _as_streamed(file.path, read_tensors(header), disk)
    report = _report(file.path, file.n_bytes, disk, engine)
    if wanted.json:
        print_json(report)
    else:
        Terminal(highlight=False).print(_shown(report))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "headrace iobench", allow_abbrev=False,
        description="Measure reads of a model's file by size, number in flight and order, past the"
        " page cache. Nothing is written. Better while the machine does nothing else.",
    )  # fmt: skip
    parser.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def _as_streamed(path: Path, table: TensorTable, disk: DiskProfile) -> ReadSpeed:
    """Return how fast streaming such a model reads: pieces in order, or slices of experts."""
    order: Order = "random" if table.experts else "sequential"
    slices = Counter(n_bytes for block in table.experts for n_bytes in block.slice_bytes)
    request_bytes = slices.most_common(1)[0][0] if slices else PIECE_BYTES
    wanted = (request_bytes, disk.reads_in_flight(min(request_bytes, PIECE_BYTES)))
    points = disk.random if order == "random" else disk.sequential
    measured = {(point.request_bytes, point.depth): point for point in points}
    if wanted not in measured:
        reads = Reads(*wanted, is_random=order == "random")
        [measured[wanted]] = measure_reads(path, [reads])
    return _speed(order, measured[wanted])


def _report(path: Path, file_bytes: int, disk: DiskProfile, engine: ReadSpeed) -> Report:
    speeds = [_speed("sequential", point) for point in disk.sequential]
    speeds += [_speed("random", point) for point in disk.random]
    best = max([engine, *speeds], key=lambda speed: speed.bytes_per_s)
    measured = {point.request_bytes for point in disk.sequential}
    return Report(
        path=str(path), file_bytes=file_bytes, disk=disk, engine=engine, best=best,
        part_of_best=engine.bytes_per_s / best.bytes_per_s,
        too_large_bytes=tuple(n for n in REQUEST_BYTES if n not in measured),
    )  # fmt: skip


def _speed(order: Order, point: DiskPoint) -> ReadSpeed:
    return ReadSpeed(
        order=order, request_bytes=point.request_bytes, depth=point.depth,
        bytes_per_s=point.bytes_per_s,
    )  # fmt: skip


def _shown(report: Report) -> Group:
    disk = report.disk
    how = "read directly" if disk.is_direct else "which refuses direct reads"
    lines: list[RenderableType] = [
        f"{report.path}: {format_bytes(report.file_bytes)} on disk {disk.device}, {how}",
        _table(report, "sequential", disk.sequential),
        _table(report, "random", disk.random),
    ]
    if report.too_large_bytes:
        sizes = ", ".join(format_bytes(n) for n in report.too_large_bytes)
        lines.append(f"not measured, the file is too small: {sizes}")
    lines += [
        f"* streaming: {report.engine}: {speed(report.engine.bytes_per_s)},"
        f" {report.part_of_best:.0%} of the best",
        f"best: {report.best}: {speed(report.best.bytes_per_s)}",
    ]
    return Group(*lines)


def _table(report: Report, order: Order, points: Sequence[DiskPoint]) -> Table:
    """Return speeds in MB/s, a row for each size and a column for each depth."""
    engine = report.engine
    cells = {
        (point.request_bytes, point.depth): f"{point.bytes_per_s / 1e6:.0f}" for point in points
    }
    if engine.order == order:
        cells[engine.request_bytes, engine.depth] = f"{engine.bytes_per_s / 1e6:.0f}*"
    name = "in order" if order == "sequential" else "at random"
    table = Table(title=f"{name}, MB/s by reads in flight", title_justify="left", padding=(0, 0))
    table.add_column("", justify="right", no_wrap=True)
    for depth in DEPTHS:
        table.add_column(str(depth), justify="right", no_wrap=True, min_width=5)
    for size in sorted({size for size, _ in cells}):
        table.add_row(format_bytes(size), *(cells.get((size, depth), "") for depth in DEPTHS))
    return table


def _progress() -> Progress:
    terminal = Terminal(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), console=terminal, transient=True,
        disable=not terminal.is_terminal,
    )  # fmt: skip
