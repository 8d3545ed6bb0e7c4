"""Where a model's weights go, and how it is loaded: plans, as pure functions.

In: a model's header, the machine's figures, settings. Out: values. No I/O, no llama.cpp.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, cast

from headrace.engine.context_plan import kv_bytes_per_cell, plan_context, widens
from headrace.engine.errors import DoesNotFit, ModelUnusable
from headrace.engine.gguf import Header, Tensor
from headrace.engine.messages import Load, Mode
from headrace.engine.plan import ContextPlan, WeightsPlan, format_mib
from headrace.engine.tensors import ExpertBlock, TensorTable

if TYPE_CHECKING:
    from headrace.config.settings import Settings
    from headrace.engine.hardware import Topology
    from headrace.engine.library import Model

DEFAULT_SLOTS = 4
# Memory left to others: compute buffers, the interpreter, the rest of the machine.
HEADROOM_BYTES = 512 << 20
# Tokens of one forward pass; llama.cpp's own default.
N_BATCH = 512


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
            f"{header.path}: {mode} needs {format_mib(result.n_bytes)} of memory at least"
            f" ({format_mib(resident)} of weights, {format_mib(stream)} to stream the others,"
            f" {format_mib(kv_bytes)} of context, {format_mib(compute_bytes)} of buffers),"
            f" {format_mib(budget_bytes)} is there; raise --memory or lower --context",
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
        widens=widens(header),
    )  # fmt: skip


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
