"""How fast a planned model will be, what will limit it, and what more memory would change.

In: what was measured of the machine, a model's tensors, a plan, what was learnt of its experts.
Out: a Forecast. Pure; knows no file, and stores nothing of what it learns.

A pass takes the longer of its arithmetic and its reads, as far as the two overlap, and their sum as
far as they don't. Figures are those of one sequence with a short context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.engine.errors import EngineError
from headrace.engine.gguf import Header, Tensor
from headrace.engine.messages import Forecast, Limit, Load, MoreMemory
from headrace.engine.placement import N_IO_THREADS, WeightsPlan, plan_model
from headrace.engine.profile import DiskProfile, KernelSpeed, Profile
from headrace.engine.routing import ExpertUsage, Routing
from headrace.engine.tensors import TensorTable

N_PROMPT = 1000
# More memory that is worth telling about, in percent.
MORE_PERCENT = (25, 50, 100)

# native/readers.h, READERS_PIECE_BYTES
_PIECE_BYTES = 1 << 20
# Linux reads mapped files ahead by 128 KiB, one window while the one before is used.
_READ_AHEAD_BYTES, _READ_AHEAD_DEPTH = 128 << 10, 2
# What of the reads of missed experts is hidden behind arithmetic. Where the two took about as long,
# others gained 5 to 17 % by guessing the next layer's experts, 9 to 24 % by computing what is there
# while the rest is read. The low ends give a quarter; tests/bench/streaming.py on two cores, which
# also do the reading, gave less.
_HIDDEN_MISSES = 0.2
# native/callback.c, ALL_CHOSEN: from so many choices for each expert on layers are read ahead whole
_ALL_CHOSEN = 3
# Of a block's operations beside its products with weights, and of the threads that wait for each
# other between them. SmolLM2's 30 blocks: 7.4 ms for a token, 6.0 of them for products.
_BLOCK_S = 50e-6
# Of what reading memory alone reaches: kernels that are that fast wait for memory.
_MEMORY_BOUND = 0.7
# Rows are picked out of these, they are no matrices to multiply with.
_LOOKED_UP = frozenset({
    "token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"
})  # fmt: skip
_OUTPUT = "output.weight"
_FLOATS = frozenset({"F32", "F16", "BF16"})

# A correction takes this part of the error, measured as a ratio, and stays within bounds: what is
# further off is another fault, such as a busy machine.
_LEARNING = 0.75
_LEAST_CORRECTION, _MOST_CORRECTION = 0.25, 4.0


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass: its arithmetic, its reads, and the share of these that it hides."""

    compute_s: float
    read_bytes: float
    read_s: float
    hidden: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.hidden * self.read_s) + (1 - self.hidden) * self.read_s


def forecast(
    profile: Profile, disk: DiskProfile, table: TensorTable, plan: WeightsPlan, *,
    usage: ExpertUsage | None = None, correction: float = 1.0,
    larger: Sequence[tuple[int, WeightsPlan]] = (),
) -> Forecast:  # fmt: skip
    """Return what to expect of a model that is loaded from disk as plan says.

    larger are budgets in bytes with their plans; correction is what calibrate has learnt.

    Raises:
        EngineError: the profile has no kernels.
    """
    if not profile.kernels:
        raise EngineError("the hardware profile has no kernel speeds, expected one at least")
    model = _Model(profile, disk, table, tuple(_routings(table, usage)))
    decode, prefill = model.decode(plan), model.prefill(plan)
    types = sorted({tensor.type_name for tensor, _ in model.matrices()} - _FLOATS)
    is_routed = bool(plan.expert_blocks)
    return Forecast(
        decode_tokens_per_s=correction / decode.seconds,
        ttft_s_per_1000_tokens=N_PROMPT / _n_prefill(plan) * prefill.seconds,
        load_s=model.load_s(plan),
        limit=model.limit(decode),
        read_bytes_per_token=decode.read_bytes,
        expert_hit_rate=model.hit_rate(plan) if is_routed else None,
        hit_rate_source=("prior" if usage is None else "learnt") if is_routed else None,
        correction=correction,
        unmeasured_types=tuple(name for name in types if profile.kernel(name) is None),
        more_memory=tuple(model.more_memory(*other, correction) for other in larger),
    )


def at_disk_speed(load: Load, disk: DiskProfile) -> Load:
    """Return load with the speed of disk as streaming reads it, unless load has one already."""
    if load.disk_bytes_per_s:
        return load
    speed = disk.bytes_per_s(_PIECE_BYTES, N_IO_THREADS, is_random=False)
    return msgspec.structs.replace(load, disk_bytes_per_s=speed)


def forecast_load(
    header: Header, table: TensorTable, load: Load, plan: WeightsPlan, budget_bytes: int,
    profile: Profile, disk: DiskProfile, *, usage: ExpertUsage | None, correction: float,
) -> Forecast:  # fmt: skip
    """Return what to expect of a model that is loaded by plan, and of one with larger budgets."""
    budgets = [budget_bytes * (100 + percent) // 100 for percent in MORE_PERCENT]
    larger = [(budget, plan_model(header, table, load, budget)) for budget in budgets]
    return forecast(
        profile, disk, table, plan, usage=usage, correction=correction, larger=larger
    )  # fmt: skip


def calibrate(forecast: Forecast, measured_tokens_per_s: float) -> float:
    """Return the correction for the next forecast of a model that decoded at that speed.

    It goes most of the way from the forecast's own correction to what would have been right.
    """
    error = measured_tokens_per_s / forecast.decode_tokens_per_s
    correction = forecast.correction * math.pow(error, _LEARNING)
    return min(max(correction, _LEAST_CORRECTION), _MOST_CORRECTION)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's tensors and routers, with the speeds of the machine that it is to run on."""

    profile: Profile
    disk: DiskProfile
    table: TensorTable
    routings: tuple[Routing, ...]
    """Of each pool of the table."""

    def decode(self, plan: WeightsPlan) -> _Pass:
        """Return the pass of one token."""
        compute_s = self.table.n_blocks * _BLOCK_S + sum(
            tensor.n_bytes * share / self._decode_speed(tensor) for tensor, share in self.matrices()
        )
        if not plan.expert_blocks:
            return _Pass(compute_s, *self._read_dense(plan), hidden=1.0)
        missed = [
            (1 - routing.hit_rate(n_records)) * routing.n_blocks * routing.n_used
            for routing, n_records in zip(self.routings, plan.pool_records, strict=True)
        ]
        return _Pass(compute_s, *self._read_experts(plan, missed), hidden=_HIDDEN_MISSES)

    def prefill(self, plan: WeightsPlan) -> _Pass:
        """Return the pass of a physical batch of a prompt."""
        n = _n_prefill(plan)
        compute_s = self._prefill_compute_s(n)
        if not plan.expert_blocks:
            return _Pass(compute_s, *self._read_dense(plan), hidden=1.0)
        missed = [
            _misses_of_batch(routing, n_records, n)
            for routing, n_records in zip(self.routings, plan.pool_records, strict=True)
        ]
        n_experts = max(block.n_experts for block in self.table.experts)
        hidden = 1.0 if n * self.table.n_used >= _ALL_CHOSEN * n_experts else _HIDDEN_MISSES
        return _Pass(compute_s, *self._read_experts(plan, missed), hidden=hidden)

    def hit_rate(self, plan: WeightsPlan) -> float:
        """Return the hit rate of all pools together."""
        choices = [routing.n_blocks * routing.n_used for routing in self.routings]
        rates = [
            routing.hit_rate(n_records)
            for routing, n_records in zip(self.routings, plan.pool_records, strict=True)
        ]
        return sum(n * rate for n, rate in zip(choices, rates, strict=True)) / sum(choices)

    def load_s(self, plan: WeightsPlan) -> float:
        if plan.mode == "full-resident":  # llama.cpp maps the file
            size, depth = _READ_AHEAD_BYTES, _READ_AHEAD_DEPTH
        else:
            size, depth = _PIECE_BYTES, N_IO_THREADS
        read_s = plan.resident_bytes / self.disk.bytes_per_s(size, depth, is_random=False)
        return read_s + plan.stream_bytes / self.profile.memory_bytes_per_s

    def limit(self, decode: _Pass) -> Limit:
        if decode.read_s > decode.compute_s:
            return "disk"
        n_bytes = sum(tensor.n_bytes * share for tensor, share in self.matrices())
        is_fast = n_bytes >= _MEMORY_BOUND * self.profile.memory_bytes_per_s * decode.compute_s
        return "memory bandwidth" if is_fast else "compute"

    def more_memory(self, budget_bytes: int, plan: WeightsPlan, correction: float) -> MoreMemory:
        decode = self.decode(plan)
        return MoreMemory(
            budget_bytes=budget_bytes,
            mode=plan.mode,
            decode_tokens_per_s=correction / decode.seconds,
            limit=self.limit(decode),
        )

    def matrices(self) -> Iterable[tuple[Tensor, float]]:
        """Yield the tensors that a token is multiplied with, and the share of each that is used."""
        is_tied = all(tensor.name != _OUTPUT for tensor in self.table.trunk)
        for tensor in self.table.trunk:
            if tensor.name not in _LOOKED_UP or (is_tied and tensor.name == "token_embd.weight"):
                yield tensor, 1.0
        for item in self.table.dense:
            yield item.tensor, 1.0
        for block in self.table.experts:
            for part in block.parts:
                yield part, min(self.table.n_used / block.n_experts, 1.0)

    def _prefill_compute_s(self, n_tokens: int) -> float:
        """Return the arithmetic of n_tokens: no product is faster than going through its weights.

        Of the output only the last token's row is asked for.
        """
        seconds = 0.0
        for tensor in (*self.table.trunk, *(item.tensor for item in self.table.dense)):
            if len(tensor.shape) > 1 and tensor.name not in _LOOKED_UP | {_OUTPUT}:
                flops = self._kernel(tensor).prefill_flops
                arithmetic_s = 2 * tensor.n_elements * n_tokens / flops
                seconds += max(arithmetic_s, tensor.n_bytes / self._decode_speed(tensor))
        for pool, routing in zip(self.table.pools, self.routings, strict=True):
            touched = routing.n_distinct(n_tokens) / routing.n_experts
            n_products = n_tokens * routing.n_used / pool[0].n_experts
            for part in (part for block in pool for part in block.parts):
                flops = self._kernel(part).expert_prefill_flops
                arithmetic_s = 2 * part.n_elements * n_products / flops
                seconds += max(arithmetic_s, touched * part.n_bytes / self._decode_speed(part))
        return seconds

    def _read_dense(self, plan: WeightsPlan) -> tuple[float, float]:
        """Return bytes and seconds of what a pass streams through the ring."""
        n_bytes = sum(tensor.n_bytes for tensor in plan.streamed)
        speed = self.disk.bytes_per_s(_PIECE_BYTES, N_IO_THREADS, is_random=False)
        return n_bytes, n_bytes / speed

    def _read_experts(self, plan: WeightsPlan, n_missed: Iterable[float]) -> tuple[float, float]:
        """Return bytes and seconds of reading so many experts into each pool.

        At full depth: where a layer misses too few to fill the queue, the disk does not limit.
        """
        n_bytes = seconds = 0.0
        for pool, n in zip(plan.expert_blocks, n_missed, strict=True):
            for slice_bytes in pool[0].slice_bytes:
                piece = min(slice_bytes, _PIECE_BYTES)
                speed = self.disk.bytes_per_s(piece, N_IO_THREADS, is_random=True)
                n_bytes += n * slice_bytes
                seconds += n * slice_bytes / speed
        return n_bytes, seconds

    def _kernel(self, tensor: Tensor) -> KernelSpeed:
        """Return the speed of a tensor's type; of one not measured, the slowest that was."""
        kernels = self.profile.kernels
        return self.profile.kernel(tensor.type_name) or KernelSpeed(
            type=tensor.type_name,
            decode_bytes_per_s=min(kernel.decode_bytes_per_s for kernel in kernels),
            prefill_flops=min(kernel.prefill_flops for kernel in kernels),
            expert_prefill_flops=min(kernel.expert_prefill_flops for kernel in kernels),
        )

    def _decode_speed(self, tensor: Tensor) -> float:
        """Return the weight bytes a second of one token: not more than come from memory."""
        memory = self.profile.memory_bytes_per_s
        if tensor.type_name in _FLOATS and self.profile.kernel(tensor.type_name) is None:
            return memory
        return min(self._kernel(tensor).decode_bytes_per_s, memory)


def _routings(table: TensorTable, usage: ExpertUsage | None) -> Iterable[Routing]:
    """Yield the routing of each pool."""
    place = {block.block: i for i, block in enumerate(table.experts)}
    for pool in table.pools:
        n_experts = pool[0].n_experts
        n_used = min(table.n_used, n_experts)
        if usage is None:
            yield Routing.prior(len(pool), n_experts, n_used)
        else:
            yield Routing.learnt(usage, [place[block.block] for block in pool], n_used)


def _n_prefill(plan: WeightsPlan) -> int:
    return min(plan.n_ubatch, N_PROMPT)


def _misses_of_batch(routing: Routing, n_records: int, n_tokens: int) -> float:
    """Return the experts that a batch has to have read into a cache of n_records.

    It goes through the layers once: a cache that can't hold all that it uses keeps nothing until
    the next batch comes to the same layer.
    """
    distinct = routing.n_distinct(n_tokens)
    if n_records < distinct:
        return distinct
    n_choices = n_tokens * routing.n_blocks * routing.n_used
    return min(distinct, (1 - routing.hit_rate(n_records)) * n_choices)
