"""Plans, as pure functions: how many cells and slots a context gets, and how a model is loaded.

In: a model's header, the machine's figures, settings. Out: values. No I/O, no llama.cpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from headrace.engine.errors import DoesNotFit, ModelUnusable
from headrace.engine.gguf import Array, Header, Tensor
from headrace.engine.messages import Load, Mode
from headrace.engine.tensors import ExpertBlock, TensorTable

if TYPE_CHECKING:
    from headrace.config.settings import Settings
    from headrace.engine.hardware import Topology
    from headrace.engine.library import Model

# Bytes of one element of the KV cache: block bytes / block elements of the ggml types.
KV_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip

DEFAULT_SLOTS = 4
# Memory left to others: compute buffers, the interpreter, the rest of the machine.
HEADROOM_BYTES = 512 << 20
MIN_CTX = 256
# Full contexts that may be parked outside the cells.
N_PARKED = 4
# Tokens of one forward pass; llama.cpp's own default.
N_BATCH = 512


# Reads in flight, of 1 MiB at most: the fewest that keep a disk at its speed. With more, what is
# needed first comes no sooner than the rest, and what was guessed is in the way of what is needed.
# MoE of 24 x 128 experts in 4,200 MiB, 3, 4, 8 and 16 of them: 10.9, 10.4, 9.6 and 9.0 tokens/s.
N_IO_THREADS = 4
# Of a ring: a tensor in use, and one being read.
_MIN_RING_SLOTS = 2
_MAX_RING_SLOTS = 32
# Beside them, what the disk reads while a layer's attention and pins are computed: it never waits
# for a free slot. More would be memory that pins don't have: dense 8B shape in 3,072 MiB at
# 2.6 GB/s, 3, 4, 6 and 8 slots of 33 MB: 1.81, 1.69, 1.58 and 1.52 tokens/s.
_AHEAD_S = 0.01
# Of a disk that was not measured.
DISK_BYTES_PER_S = 2e9
# llama.cpp's graph, allocator and metadata, before any activation.
_COMPUTE_BASE_BYTES = 24 << 20
# A direct read may start a block early and end a block late; native/source.h.
_SPAN_ALIGN_BYTES = 4096
# Beside the records, MUL_MAT_ID counts the tokens of each: ggml-cpu.c, ggml_graph_plan.
_RECORD_COUNTER_BYTES = 64 + 8
_ROW_BYTES = 8
_HUGE_PAGE_BYTES = 2 << 20


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
    n_ubatch: int
    """Tokens of one physical batch."""
    resident_bytes: int
    stream_bytes: int
    kv_bytes: int
    compute_bytes: int

    @property
    def n_bytes(self) -> int:
        """All memory that the plan takes."""
        return self.resident_bytes + self.stream_bytes + self.kv_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """A context: tokens each sequence may have, and cells that all sequences share."""

    n_ctx: int
    n_cells: int
    n_bytes: int
    parking_bytes: int = 1 << 30
    """Memory for prefixes that are kept outside the cells."""


def kv_bytes_per_cell(header: Header, kv_type: str) -> int:
    """Return the bytes that one token takes in the KV cache, all layers together.

    Layers without attention count 0 heads in the header; models with other caches (latent
    attention) are overestimated, never underestimated.
    """
    arch = header.architecture
    n_heads = _per_layer(header, "attention.head_count")
    n_kv_heads = _per_layer(header, "attention.head_count_kv") or n_heads
    n_embd_head = header.embedding_length // max(max(n_heads, default=1), 1)
    n_k = header.get_int(f"{arch}.attention.key_length", n_embd_head)
    n_v = header.get_int(f"{arch}.attention.value_length", n_embd_head)
    return int(sum(n_kv_heads) * (n_k + n_v) * KV_BYTES[kv_type])


def _per_layer(header: Header, key: str) -> list[int]:
    """Return the value of an architecture key for each layer; it may be one number or an array."""
    value = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(value, Array):
        return [int(v) for v in value.values()]
    return [value] * header.block_count if isinstance(value, int) else []


def plan_context(
    n_ctx: int, n_slots: int, *, n_ctx_train: int, bytes_per_cell: int, budget_bytes: int,
    widens: bool = True,
) -> ContextPlan:  # fmt: skip
    """Return the context for n_slots sequences of n_ctx tokens within budget_bytes.

    The context is bounded by what the model was trained for. When memory is short, the sequences
    share fewer cells first (they seldom are full all at once), then each gets a shorter context.
    widens is false for models whose rope factors depend on the number of cells.
    """
    n_ctx = max(min(n_ctx, n_ctx_train) if n_ctx_train > 0 else n_ctx, 4)
    n_fit = max(budget_bytes // max(bytes_per_cell, 1), MIN_CTX)
    n_ctx = min(n_ctx, n_fit)
    # Cells beyond the first sequence's take at most half of the memory.
    n_cells = min(n_ctx * n_slots, max(n_ctx, n_fit // 2)) if widens else n_ctx
    n_cells = -(-n_cells // 256) * 256  # llama.cpp rounds up to this
    n_bytes = n_cells * bytes_per_cell
    # Half of what is left, and no more than what the cells can hold.
    parking_bytes = max(min((budget_bytes - n_bytes) // 2, N_PARKED * n_ctx * bytes_per_cell), 0)
    return ContextPlan(n_ctx, n_cells, n_bytes, parking_bytes)


def plan_weights(
    header: Header, table: TensorTable, *, mode: Mode, budget_bytes: int, kv_bytes: int,
    n_batch: int, n_slots: int, disk_bytes_per_s: float = DISK_BYTES_PER_S,
) -> WeightsPlan:  # fmt: skip
    """Return where the weights of a model go so that it runs within budget_bytes.

    The budget covers weights, streaming, compute buffers and the kv_bytes of the context. The
    disk's speed decides how far ahead it is read.

    Raises:
        DoesNotFit: not even the smallest plan of mode fits the budget.
        ModelUnusable: mode does not fit the model.
    """
    compute_bytes = _compute_bytes(header, table, n_batch, n_slots)
    left = budget_bytes - kv_bytes - compute_bytes
    all_bytes = table.trunk_bytes + table.dense_bytes + table.expert_bytes
    if mode == "auto" and all_bytes <= left:
        mode = "full-resident"
    elif mode == "auto":
        mode = "expert-streaming" if table.experts else "dense-ffn-streaming"
    plan: _Parts
    if mode == "full-resident":
        plan = (), (), (), 0, 0, all_bytes, 0
    elif mode == "expert-streaming":
        if not table.experts:
            raise ModelUnusable(f"{header.path}: has no experts, expert-streaming needs some")
        plan = _stream_experts(table, left, n_batch)
    else:
        if not table.dense:
            raise ModelUnusable(f"{header.path}: has no feed-forward weights to stream")
        plan = _stream_dense(table, left, disk_bytes_per_s)
    streamed, pools, records, n_slots_ring, n_ubatch, resident, stream = plan
    result = WeightsPlan(
        mode, streamed, pools, records, n_slots_ring, n_ubatch or n_batch, resident, stream,
        kv_bytes, compute_bytes,
    )  # fmt: skip
    if result.n_bytes > budget_bytes:
        raise DoesNotFit(
            f"{header.path}: {mode} needs {_mib(result.n_bytes)} of memory at least"
            f" ({_mib(resident)} of weights, {_mib(stream)} to stream the others,"
            f" {_mib(kv_bytes)} of context, {_mib(compute_bytes)} of buffers),"
            f" {_mib(budget_bytes)} is there; raise --memory or lower --context",
            result.n_bytes, budget_bytes,
        )  # fmt: skip
    return result


def plan_model(header: Header, table: TensorTable, load: Load, budget_bytes: int) -> WeightsPlan:
    """Return where the weights go of a model that is loaded as load says, within budget_bytes.

    A context for one sequence is set aside. Where weights have to be streamed all slots have one,
    if that is an eighth of the memory beyond the smallest plan at most: memory for cells that are
    seldom used is memory that weights don't have in every step.

    Raises:
        DoesNotFit: not even the smallest plan fits the budget.
        ModelUnusable: load's mode does not fit the model.
    """
    n_ctx = min(load.n_ctx, header.context_length or load.n_ctx)
    one_bytes = -(-n_ctx // 256) * 256 * kv_bytes_per_cell(header, load.kv_type)
    plan_within = partial(
        plan_weights, header, table, mode=load.mode, n_batch=load.n_batch, n_slots=load.n_slots,
        disk_bytes_per_s=load.disk_bytes_per_s or DISK_BYTES_PER_S,
    )  # fmt: skip
    plan = plan_within(budget_bytes=budget_bytes, kv_bytes=one_bytes)
    if plan.mode == "full-resident":
        return plan
    try:
        least_bytes = plan_within(budget_bytes=0, kv_bytes=one_bytes).n_bytes
    except DoesNotFit as error:
        least_bytes = error.needed_bytes
    kv_bytes = min(one_bytes * load.n_slots, (budget_bytes - least_bytes) // 8)
    return plan_within(budget_bytes=budget_bytes, kv_bytes=max(one_bytes, kv_bytes))


def plan_model_context(
    header: Header, load: Load, plan: WeightsPlan, budget_bytes: int, n_ctx: int
) -> ContextPlan:
    """Return the context for sequences of n_ctx tokens in what plan leaves of budget_bytes."""
    left = budget_bytes - plan.resident_bytes - plan.stream_bytes - plan.compute_bytes
    return plan_context(
        n_ctx, load.n_slots, n_ctx_train=header.context_length,
        bytes_per_cell=kv_bytes_per_cell(header, load.kv_type), budget_bytes=left,
        widens=_widens(header),
    )  # fmt: skip


def _widens(header: Header) -> bool:
    """Tell whether more cells than one sequence's leave the model's numbers as they are.

    With two sets of rope factors llama.cpp chooses one by the number of cells.
    """
    return not any("rope_factors_long" in tensor.name for tensor in header.tensors)


def describe(plan: WeightsPlan, budget_bytes: int) -> str:
    """Return one line for the log: what is where."""
    parts = [f"{plan.mode}: {_mib(plan.resident_bytes)} of weights in memory"]
    if plan.streamed:
        streamed = sum(tensor.n_bytes for tensor in plan.streamed)
        parts.append(f"{_mib(streamed)} streamed through {_mib(plan.stream_bytes)}")
        n_experts = sum(block.n_experts for blocks in plan.expert_blocks for block in blocks)
        if n_experts:
            parts.append(f"{sum(plan.pool_records)} of {n_experts} experts cached")
    parts.append(f"{_mib(plan.kv_bytes)} for the context")
    return f"{', '.join(parts)}; {_mib(budget_bytes)} is the budget"


_Parts = tuple[
    tuple[Tensor, ...], tuple[tuple[ExpertBlock, ...], ...], tuple[int, ...], int, int, int, int
]


def _stream_experts(table: TensorTable, left_bytes: int, n_batch: int) -> _Parts:
    """Stream all routed experts; each pool gets its share of the memory, at least one token's."""
    pools = table.pools
    resident = table.trunk_bytes + table.dense_bytes
    records, stream, n_ubatch = [], 0, n_batch
    for blocks in pools:
        n_experts, n_used = blocks[0].n_experts, min(table.n_used, blocks[0].n_experts)
        pool_bytes = sum(part.n_bytes for block in blocks for part in block.parts)
        share = max(left_bytes - resident, 0) * pool_bytes // table.expert_bytes
        record_bytes = sum(_span_room(n) for n in blocks[0].slice_bytes)
        record_bytes += _RECORD_COUNTER_BYTES + n_used * n_batch * _ROW_BYTES
        n_fit = (share - _HUGE_PAGE_BYTES) // record_bytes
        n = min(max(n_fit, len(blocks) * n_used), len(blocks) * n_experts)
        if n < n_experts:
            n_ubatch = min(n_ubatch, n // n_used)
        records.append(n)
        stream += n * record_bytes + _HUGE_PAGE_BYTES
    streamed = tuple(part for blocks in pools for block in blocks for part in block.parts)
    return streamed, pools, tuple(records), 0, n_ubatch, resident, stream


def _stream_dense(table: TensorTable, left_bytes: int, disk_bytes_per_s: float) -> _Parts:
    """Keep as many feed-forward tensors as fit, spread evenly over their order of use."""
    tensors = [item.tensor for item in table.dense]
    slot = _span_room(max(tensor.n_bytes for tensor in tensors))
    n_slots = _MIN_RING_SLOTS + math.ceil(disk_bytes_per_s * _AHEAD_S / slot)
    n_slots = min(n_slots, max(_MIN_RING_SLOTS, len(tensors)), _MAX_RING_SLOTS)
    left_bytes -= table.trunk_bytes + table.expert_bytes
    if n_slots * slot + _HUGE_PAGE_BYTES > left_bytes:
        n_slots = _MIN_RING_SLOTS
    stream = n_slots * slot + _HUGE_PAGE_BYTES
    pin_bytes = left_bytes - stream
    pinned, streamed = 0, tensors
    # The best of shares that don't depend on the memory: more of it can't pin less.
    for share in range(1, len(tensors) + 1):
        n_bytes, others = _pin_evenly(tensors, share * table.dense_bytes // len(tensors))
        if pinned < n_bytes <= pin_bytes:
            pinned, streamed = n_bytes, others
    resident = table.trunk_bytes + table.expert_bytes + pinned
    return tuple(streamed), (), (), n_slots, 0, resident, stream


def _pin_evenly(tensors: list[Tensor], pin_bytes: int) -> tuple[int, list[Tensor]]:
    """Return the bytes that are pinned, pin_bytes at most, and the tensors that are not."""
    all_bytes = sum(tensor.n_bytes for tensor in tensors)
    pinned = seen = 0
    others = []
    for tensor in tensors:
        seen += tensor.n_bytes
        # Never more than the even share up to here: pins and reads alternate in all layers.
        if pinned + tensor.n_bytes <= pin_bytes * seen // all_bytes:
            pinned += tensor.n_bytes
        else:
            others.append(tensor)
    return pinned, others


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"


def _span_room(n_bytes: int) -> int:
    return (n_bytes + 2 * (_SPAN_ALIGN_BYTES - 1)) // _SPAN_ALIGN_BYTES * _SPAN_ALIGN_BYTES


def _compute_bytes(header: Header, table: TensorTable, n_batch: int, n_slots: int) -> int:
    """Return about what llama.cpp takes for the activations of one physical batch, and more."""
    n_embd = header.embedding_length
    widest = max((item.tensor.shape[1] for item in table.dense), default=0)
    if table.experts:
        inner = max(block.parts[-1].shape[0] for block in table.experts)
        widest = max(widest, table.n_used * (inner + n_embd))
    n_vocab = max((t.shape[1] for t in table.trunk if t.name == "token_embd.weight"), default=0)
    return _COMPUTE_BASE_BYTES + 4 * (n_batch * (8 * n_embd + 2 * widest) + n_slots * n_vocab)


def plan_load(model: Model, settings: Settings, topology: Topology) -> Load:
    """Return how model is loaded on this machine."""
    n_threads = settings.threads or topology.default_threads
    efficiency = tuple(sorted(topology.efficiency_cpus))
    return Load(
        path=str(model.path),
        name=str(model.name),
        n_ctx=settings.context,
        n_slots=settings.parallel or DEFAULT_SLOTS,
        n_batch=N_BATCH,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        # Pinned only where slow cores would otherwise take part in every matrix product.
        decode_cpus=tuple(sorted(topology.physical_performance_cpus)) if efficiency else (),
        io_cpus=efficiency,
        kv_type=settings.kv_cache_type,
        log_level=settings.log_level,
        memory_bytes=settings.memory,
        mode=cast(Mode, settings.mode),
    )
