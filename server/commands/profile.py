"""`headrace profile [MODEL]`: what this machine is and how fast, measured where it is not known.

In: a command line. Out: a table and bars, or JSON. Measures nothing itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table

from headrace.config.units import format_bytes
from headrace.engine.gguf import read_model
from headrace.engine.hardware import Topology, this_machine
from headrace.engine.memory import Memory, this_memory
from headrace.engine.profile import CPU_REPACK, DiskProfile, GpuDevice, KernelSpeed, Profile
from headrace.engine.profile_cache import profile_path
from headrace.engine.profiling import DEFAULT_TYPES, measured_profile, weight_types
from headrace.server.commands.terminal import Terminal, bars, print_json, speed

# Reads in flight of the chart; all of them are in the JSON.
_CHART_DEPTH = 8
# What people are told of backends; others are called by their names.
_BACKENDS = {CPU_REPACK: "CPU, repacked"}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints: the profile, and the memory as it is now."""

    profile: Profile
    memory: Memory
    kept_in: str


def main(arguments: Sequence[str]) -> int:
    """Print the profile of this machine; return the exit status.

    Raises:
        EngineError: the model can't be read, or the machine can't be measured.
    """
    wanted = _parse(arguments)
    topology = this_machine()
    types, path = DEFAULT_TYPES, None
    if wanted.model is not None:
        header = read_model(wanted.model)
        types, path = weight_types(header), max(header.files, key=lambda file: file.n_bytes).path
    terminal = Terminal(stderr=True)
    with terminal.status("measuring") as status:
        profile = measured_profile(
            topology, types, path, force=wanted.force,
            progress=lambda what: status.update(f"measuring {what}"),
        )  # fmt: skip
    report = Report(profile=profile, memory=this_memory(), kept_in=str(profile_path(profile.key)))
    if wanted.json:
        print_json(report)
    else:
        Terminal(highlight=False).print(_shown(report, topology))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "headrace profile", allow_abbrev=False,
        description="Show how fast memory, kernels and disks of this machine are. What is not"
        " known yet is measured; better while the machine does nothing else.",
    )  # fmt: skip
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL",
        help="a GGUF file: measure the types of its weights and the disk that holds it",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="measure all of it again")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def _shown(report: Report, topology: Topology) -> Group:
    profile = report.profile
    parts: list[Table] = [_machine(report, topology), _kernels(profile.kernels)]
    parts += [_disk(disk) for disk in profile.disks]
    return Group(*parts)


def _machine(report: Report, topology: Topology) -> Table:
    memory, profile = report.memory, report.profile
    rows = [
        ("threads", f"{profile.n_threads} of {len(topology.cpus)} CPUs"),
        ("memory", f"{format_bytes(memory.physical_bytes)}, {speed(profile.memory_bytes_per_s)}"),
        ("available", format_bytes(memory.available_bytes)),
    ]
    if memory.limit_bytes is not None:
        rows.append(("limit", f"{format_bytes(memory.limit_bytes)}, of a control group"))
    if memory.swap_total_bytes:
        total, free = (format_bytes(n) for n in (memory.swap_total_bytes, memory.swap_free_bytes))
        rows.append(("swap", f"{total}, {free} of it free"))
    rows += [(gpu.name, _gpu(gpu)) for gpu in profile.gpus]
    if not profile.gpus:
        rows.append(("GPU", "none that llama.cpp can use"))
    if not profile.disks:
        rows.append(("disk", "not measured, name a model that it holds"))
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def _gpu(gpu: GpuDevice) -> str:
    memory = "of the machine's" if gpu.is_integrated else "of its own"
    size = f"{format_bytes(gpu.total_bytes)} {memory}"
    return f"{gpu.description}, {size}, {speed(gpu.memory_bytes_per_s)}"


def _kernels(kernels: Sequence[KernelSpeed]) -> Table:
    table = Table(title="products with weights", title_justify="left")
    table.add_column("type", no_wrap=True)
    table.add_column("by", no_wrap=True)
    for name in ("decode GB/s", "prefill Gflop/s", "experts Gflop/s"):
        table.add_column(name, justify="right")
    for kernel in kernels:
        figures = (kernel.decode_bytes_per_s, kernel.prefill_flops, kernel.expert_prefill_flops)
        by = _BACKENDS.get(kernel.backend, kernel.backend)
        table.add_row(kernel.type, by, *(f"{figure / 1e9:,.1f}" for figure in figures))
    return table


def _disk(disk: DiskProfile) -> Table:
    how = "read directly" if disk.is_direct else "refuses direct reads"
    table = Table.grid()
    table.title = f"disk {disk.device}, {how}, {_CHART_DEPTH} reads at once"
    table.title_justify = "left"
    orders = (("in order", disk.sequential), ("random", disk.random))
    chart = {
        f"{order} {format_bytes(point.request_bytes)}": point.bytes_per_s
        for order, points in orders
        for point in points
        if point.depth == _CHART_DEPTH
    }
    table.add_row(bars(chart))
    return table
