"""Where a model's weights go, and how it is loaded: plans, as pure functions.

In: a model's header, the machine's figures, settings. Out: values. No I/O, no llama.cpp. With a
CostModel a plan is the fastest that fits; without one it is what keeps most in memory, and no GPU
is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from headrace.engine import tiers
from headrace.engine.buffers import ROW_BYTES, Buffers, estimated_bytes, process_buffers
from headrace.engine.context_plan import cell_bytes, plan_context, widens
from headrace.engine.errors import DoesNotFit, ModelUnusable
from headrace.engine.gguf import Header
from headrace.engine.messages import Load, Mode
from headrace.engine.pass_time import CostModel, Place
from headrace.engine.plan import N_IO_THREADS, ContextPlan, WeightsPlan, format_mib
from headrace.engine.remedies import describe_remedies, find_remedies
from headrace.engine.tensors import ExpertBlock, TensorTable, is_beside_experts
from headrace.engine.tiers import Choice, Layers, Records, Ring, Tried, UnitClass

if TYPE_CHECKING:
    from headrace.config.settings import Settings
    from headrace.engine.hardware import Topology
    from headrace.engine.library import Model

DEFAULT_SLOTS = 4
DEFAULT_CTX = 4096
# Where that does not fit, so much will do: a page of a prompt and an answer.
_LEAST_CTX = 1536
# Of a GPU's: the driver, its libraries, and what shows the desktop.
VRAM_HEADROOM_BYTES = 512 << 20
# Tokens of one forward pass; llama.cpp's own default.
N_BATCH = 512
# Where memory is short: a quarter of the activations, for four times the reads of a prompt.
_SMALL_BATCH = 128

# Of a ring: a tensor in use, and one being read.
_MIN_RING_SLOTS = 2
_MAX_RING_SLOTS = 32
# Beside them, what the disk reads while a layer's attention and pins are computed: it never waits
# for a free slot. More would be memory that pins don't have: dense 8B shape in 3,072 MiB at
# 2.6 GB/s, 3, 4, 6 and 8 slots of 33 MB: 1.81, 1.69, 1.58 and 1.52 tokens/s.
_AHEAD_S = 0.01
# Of a disk that was not measured.
DISK_BYTES_PER_S = 2e9
# A direct read may start a block early and end a block late; native/source.h.
_SPAN_ALIGN_BYTES = 4096
# Beside the records, MUL_MAT_ID counts the tokens of each: ggml-cpu.c, ggml_graph_plan.
_RECORD_COUNTER_BYTES = 64 + 8
_HUGE_PAGE_BYTES = 2 << 20


def plan_weights(
    header: Header, table: TensorTable, *, mode: Mode, budget_bytes: int, kv_bytes: int,
    n_batch: int, n_slots: int, disk_bytes_per_s: float = DISK_BYTES_PER_S,
) -> WeightsPlan:  # fmt: skip
    """Return where the weights of a model go so that it runs within budget_bytes, without a GPU.

    The budget covers weights, streaming, the kv_bytes of the context and about what its buffers
    take. The disk's speed decides how far ahead it is read.

    Raises:
        DoesNotFit: not even the smallest plan of mode fits the budget.
        ModelUnusable: mode does not fit the model.
    """
    buffers = Buffers(estimated_bytes(header, table, n_batch, n_slots), 0)
    planner = _Planner.of(header, table, None, None, n_batch, buffers, disk_bytes_per_s)
    layers = planner.layers(lambda first: (kv_bytes, 0))
    modes = _modes(header, table, mode, None)
    return planner.plan(modes, budget_bytes, lambda _: layers, is_auto=mode == "auto")


def plan_model(
    header: Header, table: TensorTable, load: Load, budget_bytes: int, cost: CostModel | None = None
) -> WeightsPlan:
    """Return where the weights go of a model that is loaded as load says, within budget_bytes.

    A context for one sequence is set aside. Where weights have to be streamed all slots have one,
    if that is an eighth of the memory beyond the smallest plan at most: memory for cells that are
    seldom used is memory that weights don't have in every step. With layers on a GPU it is one
    sequence's, and what is left over. If nothing fits, but would with a context of at least
    load's least_ctx, the plan has the longest such context, and if need be smaller batches.

    Raises:
        DoesNotFit: not even the smallest plan fits the budget; the message says what would help.
        ModelUnusable: load's mode does not fit the model.
    """
    try:
        return _plan_model(header, table, load, budget_bytes, cost)
    except DoesNotFit as error:
        smaller = _plan_smaller(header, table, load, budget_bytes, cost)
        if smaller is not None:
            return smaller
        remedies = find_remedies(
            load, header.context_length, budget_bytes,
            lambda other: _least_bytes(header, table, other, cost),
        )  # fmt: skip
        raise DoesNotFit(
            f"{error}{describe_remedies(remedies, budget_bytes)}", error.needed_bytes,
            budget_bytes, tuple(r.flags for r in remedies if r.needed_bytes <= budget_bytes),
        ) from None  # fmt: skip


def _plan_smaller(
    header: Header, table: TensorTable, load: Load, budget_bytes: int, cost: CostModel | None
) -> WeightsPlan | None:
    """Return a plan with the longest context of those that are shorter than load asks for."""
    n_ctx = min(load.n_ctx, header.context_length or load.n_ctx)
    shorter = range(load.least_ctx, n_ctx + 1, 256) if load.least_ctx else ()
    others = [
        msgspec.structs.replace(load, n_ctx=n, n_batch=n_batch)
        for n_batch in (load.n_batch, min(_SMALL_BATCH, load.n_batch))
        for n in reversed(shorter)
    ]
    if not others or _least_bytes(header, table, others[-1], cost) > budget_bytes:
        return None
    for other in others:
        with contextlib.suppress(DoesNotFit):
            return _plan_model(header, table, other, budget_bytes, cost)
    return None


def _least_bytes(header: Header, table: TensorTable, load: Load, cost: CostModel | None) -> int:
    """Return what the smallest plan takes."""
    try:
        return _plan_model(header, table, load, 0, cost).n_bytes
    except DoesNotFit as error:
        return error.needed_bytes


def _plan_model(
    header: Header, table: TensorTable, load: Load, budget_bytes: int, cost: CostModel | None
) -> WeightsPlan:
    planner = _Planner.of(
        header, table, cost, load.vram_bytes, load.n_batch, process_buffers(header, table, load),
        load.disk_bytes_per_s or DISK_BYTES_PER_S,
    )  # fmt: skip
    n_ctx = min(load.n_ctx, header.context_length or load.n_ctx)
    n_cells = -(-n_ctx // 256) * 256

    def context_bytes(first: int) -> tuple[int, int]:
        in_ram, in_vram = cell_bytes(header, load, first)
        return n_cells * in_ram, n_cells * in_vram

    one = planner.layers(context_bytes)

    def layers(mode: Mode) -> Layers:
        if mode == "full-resident":
            return one
        least_bytes = planner.least_bytes(mode, one)
        one_bytes = int(one.kv_ram_bytes[0])
        kv_bytes = min(one_bytes * load.n_slots, (budget_bytes - least_bytes) // 8)
        kv_ram_bytes = one.kv_ram_bytes.copy()
        kv_ram_bytes[0] = max(one_bytes, kv_bytes)
        return replace(one, kv_ram_bytes=kv_ram_bytes)

    modes = _modes(header, table, load.mode, cost)
    return planner.plan(modes, budget_bytes, layers, is_auto=load.mode == "auto")


def plan_model_context(
    header: Header, load: Load, plan: WeightsPlan, budget_bytes: int, n_ctx: int
) -> ContextPlan:
    """Return the context for sequences of n_ctx tokens in what plan leaves of its budgets."""
    first = max(header.block_count + 1 - plan.n_gpu_layers, 0)
    in_ram, in_vram = cell_bytes(header, load, first)
    left = budget_bytes - plan.resident_bytes - plan.stream_bytes - plan.buffer_bytes
    left_vram = plan.vram_budget_bytes - (plan.vram_bytes - plan.vram_kv_bytes)
    return plan_context(
        n_ctx, load.n_slots, n_ctx_train=header.context_length, bytes_per_cell=in_ram,
        budget_bytes=left, vram_bytes_per_cell=in_vram, vram_budget_bytes=left_vram,
        widens=widens(header),
    )  # fmt: skip


def _modes(
    header: Header, table: TensorTable, mode: Mode, cost: CostModel | None
) -> tuple[Mode, ...]:
    """Return the modes to choose from, of which the first are better if they are as fast.

    Raises:
        ModelUnusable: mode does not fit the model.
    """
    if mode == "expert-streaming" and not table.experts:
        raise ModelUnusable(f"{header.path}: has no experts, expert-streaming needs some")
    if mode == "dense-ffn-streaming" and not table.dense:
        raise ModelUnusable(f"{header.path}: has no feed-forward weights to stream")
    if mode != "auto":
        return (mode,)
    streaming: list[Mode] = ["expert-streaming"] if table.experts else []
    # Nobody knows which is faster without a profile: experts are most of a model that has any.
    if table.dense and (cost is not None or not table.experts):
        streaming.append("dense-ffn-streaming")
    return ("full-resident", *streaming)


@dataclass(frozen=True, slots=True)
class _Planner:
    """What is the same for all plans of a model on a machine."""

    header: Header
    table: TensorTable
    cost: CostModel | None
    """With a GPU only if plans may use that."""
    classes: tuple[UnitClass, ...]
    trunk: Layers
    buffers: Buffers
    vram_budget_bytes: int
    n_batch: int
    disk_bytes_per_s: float

    @classmethod
    def of(
        cls, header: Header, table: TensorTable, cost: CostModel | None, vram_bytes: int | None,
        n_batch: int, buffers: Buffers, disk_bytes_per_s: float,
    ) -> _Planner:  # fmt: skip
        gpu = None if cost is None else cost.gpu
        budget = 0
        if gpu is not None:
            free = gpu.free_bytes - VRAM_HEADROOM_BYTES
            budget = free if vram_bytes is None else min(vram_bytes, gpu.total_bytes)
        return cls(
            header, table, cost, tiers.classify(table),
            tiers.trunk_layers(table, cost, has_gpu=budget > buffers.vram_bytes), buffers, budget,
            n_batch, disk_bytes_per_s,
        )  # fmt: skip

    def layers(self, context_bytes: Callable[[int], tuple[int, int]]) -> Layers:
        """Return trunk with cells; context_bytes gives theirs of RAM and VRAM by first layer."""
        n_blocks = self.table.n_blocks
        kv = [context_bytes(max(n_blocks + 1 - int(g), 0)) for g in self.trunk.n_gpu_layers]
        ram, vram = (np.array(part, np.int64) for part in zip(*kv, strict=True))
        return replace(self.trunk, kv_ram_bytes=ram, kv_vram_bytes=vram)

    def least_bytes(self, mode: Mode, layers: Layers) -> int:
        """Return what the smallest plan of a mode takes without a GPU."""
        without = layers.without_gpu()
        return self._tried(mode, without, 0).least().ram_bytes + self.buffers.ram_bytes

    def plan(
        self, modes: Sequence[Mode], budget_bytes: int, layers: Callable[[Mode], Layers], *,
        is_auto: bool,
    ) -> WeightsPlan:  # fmt: skip
        """Return the fastest plan of modes within the budgets.

        Raises:
            DoesNotFit: there is none.
        """
        left = budget_bytes - self.buffers.ram_bytes
        tried = [(mode, layers(mode)) for mode in modes]
        found = [(self._tried(mode, of_mode, left), of_mode) for mode, of_mode in tried]
        best = [(choice, of_mode) for some, of_mode in found if (choice := some.best(left))]
        if best:
            return self._built(*min(best, key=lambda pair: pair[0].seconds))
        smaller = found[1:] if is_auto and len(found) > 1 else found
        least = min(((s.least(), ls) for s, ls in smaller), key=lambda pair: pair[0].ram_bytes)
        plan = self._built(*least)
        raise DoesNotFit(
            f"{self.header.path}: {plan.mode} needs {format_mib(plan.n_bytes)} of memory at least"
            f" ({format_mib(plan.resident_bytes)} of weights, {format_mib(plan.stream_bytes)} to"
            f" stream the others, {format_mib(plan.kv_bytes)} of context,"
            f" {format_mib(plan.buffer_bytes)} for the process),"
            f" {format_mib(budget_bytes)} is there;"
            f" raise --memory to {math.ceil(plan.n_bytes / 2**20)}MiB",
            plan.n_bytes, budget_bytes,
        )  # fmt: skip

    def _tried(self, mode: Mode, layers: Layers, ram_bytes: int) -> Tried:
        vram_bytes = self.vram_budget_bytes - self.buffers.vram_bytes
        rows = tiers.vram_rows(self.classes, layers, self.cost, vram_bytes)
        if mode == "full-resident":
            return tiers.choose_resident(self.classes, rows, self.cost)
        if mode == "expert-streaming":
            return tiers.choose_experts(self.classes, rows, self.cost, self._records(), ram_bytes)
        return tiers.choose_dense(
            self.classes, rows, self.cost, self._ring(), ram_bytes, self.disk_bytes_per_s
        )

    def _records(self) -> list[Records]:
        """Return what the records of each pool take."""
        found = []
        for pool in self.table.pools:
            n_used = min(self.table.n_used, pool[0].n_experts)
            record_bytes = sum(_span_room(n) for n in pool[0].slice_bytes)
            record_bytes += _RECORD_COUNTER_BYTES + n_used * self.n_batch * ROW_BYTES
            found.append(Records(record_bytes, _HUGE_PAGE_BYTES, n_used, pool[0].n_experts))
        return found

    def _ring(self) -> Ring:
        """Return the ring that the disk's speed asks for."""
        slot = _span_room(max(item.tensor.n_bytes for item in self.table.dense))
        n_slots = _MIN_RING_SLOTS + math.ceil(self.disk_bytes_per_s * _AHEAD_S / slot)
        n_slots = min(n_slots, max(_MIN_RING_SLOTS, len(self.table.dense)), _MAX_RING_SLOTS)
        return Ring(slot, n_slots, _MIN_RING_SLOTS, _HUGE_PAGE_BYTES)

    def _built(self, choice: Choice, layers: Layers) -> WeightsPlan:
        """Return the plan of a choice."""
        g = choice.n_gpu_layers
        places = self._places(choice)
        first = self.table.n_blocks + 1 - g
        weights = [item.tensor for item in self.table.dense]
        weights += [part for pool in self.table.pools for block in pool for part in block.parts]
        in_ram = [tensor for tensor in weights if places[tensor.name] == "ram"]
        pools, records = self._pools(choice, places)
        # So experts are chosen where they are: their numbers and guesses need no way back.
        stays = self._beside(pools)
        on_gpu = [t for t in self.table.trunk if tiers.fewest_layers(t, self.table) <= g]
        in_vram = [t for t in on_gpu if t.name not in stays]
        in_vram += [t for t in weights if places[t.name] == "vram"]
        kept = [t for t in in_ram if int(t.name.split(".")[1]) >= first] if g else []
        kv_vram_bytes = int(layers.kv_vram_bytes[g])
        vram_buffer_bytes = self.buffers.vram_bytes if g else 0
        return WeightsPlan(
            mode=choice.mode,
            streamed=tuple(tensor for tensor in weights if places[tensor.name] == "stream"),
            expert_blocks=pools,
            pool_records=records,
            n_ring_slots=choice.n_ring_slots,
            n_io_threads=self.cost.n_io_threads if self.cost else N_IO_THREADS,
            n_ubatch=self._n_ubatch(pools, records),
            resident_bytes=int(layers.ram_bytes[g]) + sum(tensor.n_bytes for tensor in in_ram),
            stream_bytes=self._stream_bytes(choice),
            kv_bytes=int(layers.kv_ram_bytes[g]),
            buffer_bytes=self.buffers.ram_bytes,
            gpu=self.cost.gpu.name if g and self.cost and self.cost.gpu else "",
            n_gpu_layers=g,
            in_vram=tuple(in_vram),
            in_ram=(*kept, *(t for t in on_gpu if t.name in stays)),
            vram_kv_bytes=kv_vram_bytes,
            vram_bytes=sum(t.n_bytes for t in in_vram) + kv_vram_bytes + vram_buffer_bytes,
            vram_budget_bytes=self.vram_budget_bytes if g else 0,
        )

    def _places(self, choice: Choice) -> dict[str, Place]:
        """Return the place of each weight that is not the trunk's."""
        places: dict[str, Place] = {}
        numbers = zip(self.classes, choice.in_vram, choice.in_ram, strict=True)
        for kind, n_in_vram, n_in_ram in numbers:
            for unit, place in tiers.place_units(kind, n_in_vram, n_in_ram):
                places |= {tensor.name: place for tensor in unit}
        return places

    def _pools(
        self, choice: Choice, places: Mapping[str, Place]
    ) -> tuple[tuple[tuple[ExpertBlock, ...], ...], tuple[int, ...]]:
        """Return the blocks of each pool, and its records."""
        found = [
            (tuple(b for b in pool if places[b.parts[0].name] == "stream"), n)
            for pool, n in zip(self.table.pools, choice.pool_records, strict=False)
            if n
        ]
        return tuple(blocks for blocks, _ in found), tuple(n for _, n in found)

    def _beside(self, pools: Sequence[Sequence[ExpertBlock]]) -> frozenset[str]:
        """Return the names of what is beside the streamed experts."""
        blocks = {block.block for pool in pools for block in pool}
        beside = (tensor for tensor in self.table.trunk if is_beside_experts(tensor))
        return frozenset(t.name for t in beside if int(t.name.split(".")[1]) in blocks)

    def _n_ubatch(self, pools: Sequence[Sequence[ExpertBlock]], records: Sequence[int]) -> int:
        """Return the tokens of a batch that no pool is too small for."""
        n_ubatch = self.n_batch
        for blocks, n in zip(pools, records, strict=True):
            n_used = min(self.table.n_used, blocks[0].n_experts)
            if n < blocks[0].n_experts:
                n_ubatch = min(n_ubatch, n // n_used)
        return n_ubatch

    def _stream_bytes(self, choice: Choice) -> int:
        if choice.mode == "dense-ffn-streaming":
            ring = self._ring()
            return choice.n_ring_slots * ring.slot_bytes + ring.extra_bytes
        records = zip(self._records(), choice.pool_records, strict=False)
        return sum(n * of.record_bytes + of.extra_bytes for of, n in records if n)


def _span_room(n_bytes: int) -> int:
    return (n_bytes + 2 * (_SPAN_ALIGN_BYTES - 1)) // _SPAN_ALIGN_BYTES * _SPAN_ALIGN_BYTES


def plan_load(model: Model, settings: Settings, topology: Topology) -> Load:
    """Return how model is loaded on this machine."""
    n_threads = settings.threads or topology.default_threads
    efficiency = tuple(sorted(topology.efficiency_cpus))
    return Load(
        path=str(model.path),
        name=str(model.name),
        n_ctx=settings.context or DEFAULT_CTX,
        least_ctx=0 if settings.context else _LEAST_CTX,
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
        vram_bytes=settings.vram,
        mode=cast(Mode, settings.mode),
    )
