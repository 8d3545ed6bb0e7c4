"""Plans and forecasts of published models on described machines, as a table for people to check.

In: nothing. Out: the table as Markdown on stdout. tests/unit/test_golden_plans.py compares it with
tests/unit/golden/plans.md; after a change that was meant, write it anew from the project's root:

    .venv/bin/python tests/support/golden_plans.py > tests/unit/golden/plans.md
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import header_only
import msgspec

from headrace.engine.disk import locate
from headrace.engine.errors import DoesNotFit
from headrace.engine.forecast import NO_CORRECTION, forecast_load
from headrace.engine.gguf import Header, read_model
from headrace.engine.hardware import this_machine
from headrace.engine.memory import spare_bytes
from headrace.engine.messages import ContextCost, Forecast, Load
from headrace.engine.pass_time import CostModel
from headrace.engine.placement import (
    DEFAULT_SLOTS,
    N_BATCH,
    plan_model,
    plan_model_context,
)
from headrace.engine.plan import WeightsPlan
from headrace.engine.profile import DiskPoint, DiskProfile, GpuDevice, KernelSpeed, Profile
from headrace.engine.profile_cache import keep_profile, read_facts
from headrace.engine.questions import context_cost
from headrace.engine.tensors import TensorTable, read_tensors

GIB = 1 << 30
RAM_GIB = (16, 32, 64)
VRAM_GIB = (0, 8, 24)
DISK_GB_PER_S = (1.0, 3.5, 7.0)
# The system and what else runs on the machine.
OTHERS_BYTES = 2 * GIB
N_CTX = 4096
COLUMNS = (
    "model, file in GB", "RAM in GiB", "VRAM in GiB", "disk in GB/s", "mode",
    "layers on the GPU", "VRAM used, GiB", "weights in RAM, GiB", "cache or ring, GiB",
    "context, GiB", "experts cached, %", "hits, %", "read per token, MB",
    "tokens/s", "with 25, 50, 100 % more", "s to 1000 tokens", "s to load", "limit",
)  # fmt: skip

# A desktop with 8 cores and DDR5: decode near its 60 GB/s, prefill as AVX2 kernels have it.
_KERNELS = (
    KernelSpeed("Q4_K", 46e9, 1.0e12, 0.6e12),
    KernelSpeed("Q5_0", 40e9, 0.7e12, 0.4e12),
    KernelSpeed("Q5_K", 44e9, 0.8e12, 0.5e12),
    KernelSpeed("Q6_K", 46e9, 0.8e12, 0.5e12),
    KernelSpeed("Q8_0", 54e9, 1.0e12, 0.6e12),
    KernelSpeed("MXFP4", 44e9, 0.9e12, 0.55e12),
)
# Bandwidths of a GPU with 8 and one with 24 GiB, and the arithmetic that their kernels reach.
_GPUS = {8: (272e9, 25e12), 24: (936e9, 50e12)}
# One token's products come near that bandwidth; those of experts are many and small.
_GPU_DECODE, _GPU_EXPERTS = 0.75, 0.5
# Over PCIe 4.0, from memory that the driver has not pinned.
_GPU_LOAD = 12e9
# The share of its best speed that a disk gives, by size in KiB and depth.
_DISK_SHARES = {
    (128, 1): 0.2, (128, 2): 0.35, (128, 4): 0.6, (128, 8): 0.8,
    (1024, 1): 0.55, (1024, 4): 1.0, (1024, 8): 1.0,
}  # fmt: skip
_RANDOM_SHARE = 0.9


def machine(disk_bytes_per_s: float, vram_gib: int = 0) -> tuple[Profile, DiskProfile]:
    """Return the desktop with a disk of that speed, and a GPU that has so much memory, if any."""
    sequential = tuple(
        DiskPoint(kib << 10, depth, share * disk_bytes_per_s)
        for (kib, depth), share in _DISK_SHARES.items()
    )
    random = tuple(
        DiskPoint(point.request_bytes, point.depth, _RANDOM_SHARE * point.bytes_per_s)
        for point in sequential
    )
    disk = DiskProfile("259:0", True, sequential, random)
    kernels: tuple[KernelSpeed, ...] = _KERNELS
    gpus: tuple[GpuDevice, ...] = ()
    if vram_gib:
        memory, flops = _GPUS[vram_gib]
        kernels += tuple(
            KernelSpeed(
                k.type, _GPU_DECODE * memory, flops, _GPU_EXPERTS * flops, "GPU0",
                load_bytes_per_s=_GPU_LOAD,
            )
            for k in _KERNELS
        )  # fmt: skip
        gpus = (GpuDevice("GPU0", "a GPU", vram_gib * GIB, vram_gib * GIB, memory),)
    return Profile("golden", 8, 60e9, kernels, gpus, (disk,)), disk


def pretend(path: Path, disk_bytes_per_s: float, n_threads: int = 0, vram_gib: int = 0) -> Profile:
    """Keep and return a profile that has the desktop's speeds for this machine and path's disk.

    n_threads is what the machine has unless it is given.
    """
    profile, disk = machine(disk_bytes_per_s, vram_gib)
    topology = this_machine()
    pretended = msgspec.structs.replace(
        profile,
        key=read_facts(topology, n_threads or topology.default_threads).key,
        disks=(msgspec.structs.replace(disk, device=locate(path)[0]),),
    )
    keep_profile(pretended)
    return pretended


def load(header: Header, disk_bytes_per_s: float, said: ContextCost | None = None) -> Load:
    """Return how a model is loaded there without any setting; said is what llama.cpp says of it."""
    return Load(
        path=str(header.path), name="", n_ctx=N_CTX, n_slots=DEFAULT_SLOTS, n_batch=N_BATCH,
        n_threads=8, n_threads_batch=8, disk_bytes_per_s=disk_bytes_per_s, context_cost=said,
    )  # fmt: skip


def predict(
    header: Header, table: TensorTable, budget_bytes: int, disk_bytes_per_s: float,
    vram_gib: int = 0, said: ContextCost | None = None,
) -> tuple[WeightsPlan, Forecast]:  # fmt: skip
    """Return plan and forecast of a model on the desktop; said is what llama.cpp says of it.

    Raises:
        DoesNotFit: it does not run in budget_bytes.
    """
    cost = CostModel.of(*machine(disk_bytes_per_s, vram_gib), table, None)
    asked = load(header, disk_bytes_per_s, said)
    plan = plan_model(header, table, asked, budget_bytes, cost)
    return plan, forecast_load(header, asked, plan, budget_bytes, cost, correction=NO_CORRECTION)


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield _line(COLUMNS)
    yield _line("---" for _ in COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        for model in header_only.MODELS:
            header = read_model(header_only.build(model, Path(folder)))
            table = read_tensors(header)
            said = context_cost(load(header, 0.0))
            file_gb = sum(file.n_bytes for file in header.files) / 1e9
            machines = itertools.product(RAM_GIB, VRAM_GIB, DISK_GB_PER_S)
            for ram_gib, vram_gib, disk_gb_per_s in machines:
                yield _line([
                    f"{model.name}, {file_gb:.1f}", f"{ram_gib}", f"{vram_gib}",
                    f"{disk_gb_per_s:g}",
                    *_cells(header, table, said, ram_gib, vram_gib, disk_gb_per_s),
                ])  # fmt: skip


def _cells(
    header: Header, table: TensorTable, said: ContextCost, ram_gib: int, vram_gib: int,
    disk_gb_per_s: float,
) -> list[str]:  # fmt: skip
    budget_bytes = spare_bytes(ram_gib * GIB - OTHERS_BYTES)
    try:
        plan, expected = predict(header, table, budget_bytes, disk_gb_per_s * 1e9, vram_gib, said)
    except DoesNotFit as error:
        return [f"needs {error.needed_bytes / GIB:.1f} GiB"] + [""] * (len(COLUMNS) - 5)
    asked = load(header, disk_gb_per_s * 1e9, said)
    context = plan_model_context(header, asked, plan, budget_bytes, N_CTX)
    n_experts = sum(block.n_experts for pool in plan.expert_blocks for block in pool)
    hit_rate = expected.expert_hit_rate
    return [
        plan.mode,
        f"{plan.n_gpu_layers}" if plan.gpu else "",
        f"{(plan.vram_bytes - plan.vram_kv_bytes + context.vram_bytes) / GIB:.1f}",
        f"{plan.resident_bytes / GIB:.1f}",
        f"{plan.stream_bytes / GIB:.1f}",
        f"{(context.n_bytes + context.vram_bytes) / GIB:.1f}",
        f"{100 * sum(plan.pool_records) / n_experts:.0f}" if n_experts else "",
        "" if hit_rate is None else f"{100 * hit_rate:.0f}",
        f"{expected.read_bytes_per_token / 1e6:.0f}",
        f"{expected.decode_tokens_per_s:.3g}",
        ", ".join(f"{more.decode_tokens_per_s:.3g}" for more in expected.more_memory),
        f"{expected.ttft_s_per_1000_tokens:.3g}",
        f"{expected.load_s:.3g}",
        expected.limit,
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    for row in rows():
        print(row)


if __name__ == "__main__":
    main()
