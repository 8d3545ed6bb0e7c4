"""What a plan says: where a model's weights are, and how many cells and slots its context has.

Values that placement makes, and that loading, streaming and forecasts go by.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.gguf import Tensor
from headrace.engine.messages import Mode
from headrace.engine.tensors import ExpertBlock

# Reads in flight, of 1 MiB at most, from a disk that was not measured: the fewest that keep most
# disks at their speed. With more, what is needed first comes no sooner than the rest, and what was
# guessed is in the way of what is needed.
# MoE of 24 x 128 experts in 4,200 MiB, 3, 4, 8 and 16 of them: 10.9, 10.4, 9.6 and 9.0 tokens/s.
N_IO_THREADS = 4


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """Where a model's weights are: resident, or streamed through records or a ring."""

    mode: Mode
    streamed: tuple[Tensor, ...]
    """In the order of use; all others are loaded into memory for good."""
    expert_blocks: tuple[tuple[ExpertBlock, ...], ...]
    """The blocks of each pool of records."""
    pool_records: tuple[int, ...]
    n_ring_slots: int
    n_io_threads: int
    """Reads in flight."""
    n_ubatch: int
    """Tokens of one physical batch."""
    resident_bytes: int
    stream_bytes: int
    kv_bytes: int
    buffer_bytes: int
    """What the process takes beside that: llama.cpp's buffers, vocabulary, interpreter."""
    gpu: str = ""
    """ggml's name of the device whose memory is used; "": none."""
    n_gpu_layers: int = 0
    """As llama.cpp counts: the output is the first of them, then the layers from the last on."""
    in_vram: tuple[Tensor, ...] = ()
    in_ram: tuple[Tensor, ...] = ()
    """Of the layers on the GPU, but not streamed: what stays in memory all the same."""
    vram_kv_bytes: int = 0
    vram_bytes: int = 0
    """All of the GPU's memory that the plan takes: weights, KV cache and compute buffers."""
    vram_budget_bytes: int = 0
    """What it may take; contexts can have the rest."""

    @property
    def way(self) -> str:
        """What decides how far off forecasts are: the mode, and how much of it is on a GPU."""
        if not self.gpu:
            return self.mode
        is_whole = not (self.in_ram or self.streamed or self.kv_bytes)
        return f"{self.mode} {'on' if is_whole else 'beside'} {self.gpu}"

    @property
    def n_bytes(self) -> int:
        """All memory that the plan takes, but for the GPU's."""
        return self.resident_bytes + self.stream_bytes + self.kv_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """A context: tokens each sequence may have, and cells that all sequences share."""

    n_ctx: int
    n_cells: int
    n_bytes: int
    """Of memory; what of the cache is on a GPU is vram_bytes."""
    parking_bytes: int = 1 << 30
    """Memory for prefixes that are kept outside the cells."""
    vram_bytes: int = 0


def describe(plan: WeightsPlan, budget_bytes: int) -> str:
    """Return one line for the log: what is where."""
    parts = [f"{plan.mode}: {format_mib(plan.resident_bytes)} of weights in memory"]
    if plan.streamed:
        streamed = sum(tensor.n_bytes for tensor in plan.streamed)
        parts.append(f"{format_mib(streamed)} streamed through {format_mib(plan.stream_bytes)}")
        n_experts = sum(block.n_experts for blocks in plan.expert_blocks for block in blocks)
        if n_experts:
            parts.append(f"{sum(plan.pool_records)} of {n_experts} experts cached")
    if plan.gpu:
        vram = format_mib(plan.vram_bytes)
        parts.append(f"{vram} in the memory of {plan.gpu} with {plan.n_gpu_layers} layers")
    parts.append(f"{format_mib(plan.kv_bytes)} for the context")
    return f"{', '.join(parts)}; {format_mib(budget_bytes)} is the budget"


def format_mib(n_bytes: int) -> str:
    """Return bytes as words for a log line."""
    return f"{n_bytes / 2**20:,.1f} MiB"
