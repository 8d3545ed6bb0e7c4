"""How long a forward pass of a planned model takes: its arithmetic, its reads, and their overlap.

In: what was measured of the machine, a model's tensors, what was learnt of its experts, a plan.
Out: a PassTime. Pure; knows neither how plans are made nor what is told of them.

A pass takes the longer of its arithmetic and its reads, as far as the two overlap, and their sum as
far as they don't. Figures are those of one sequence with a short context.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine.errors import EngineError
from headrace.engine.gguf import Tensor
from headrace.engine.messages import Limit
from headrace.engine.plan import N_IO_THREADS, WeightsPlan
from headrace.engine.profile import DiskProfile, KernelSpeed, Profile
from headrace.engine.routing import ExpertUsage, Routing
from headrace.engine.tensors import TensorTable

N_PROMPT = 1000
# native/readers.h, READERS_PIECE_BYTES
PIECE_BYTES = 1 << 20
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
FLOATS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class PassTime:
    """A forward pass: its arithmetic, its reads, and the share of these that it hides."""

    compute_s: float
    read_bytes: float
    read_s: float
    hidden: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return max(self.compute_s, self.hidden * self.read_s) + (1 - self.hidden) * self.read_s


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model's tensors and routers, with the speeds of the machine that it is to run on."""

    profile: Profile
    disk: DiskProfile
    table: TensorTable
    routings: tuple[Routing, ...]
    """Of each pool of the table."""

    @classmethod
    def of(
        cls, profile: Profile, disk: DiskProfile, table: TensorTable, usage: ExpertUsage | None
    ) -> CostModel:
        """Return the model of table with what was learnt of its experts.

        Raises:
            EngineError: the profile has no kernels.
        """
        if not profile.kernels:
            raise EngineError("the hardware profile has no kernel speeds, expected one at least")
        return cls(profile, disk, table, tuple(_routings(table, usage)))

    def decode(self, plan: WeightsPlan) -> PassTime:
        """Return the pass of one token."""
        compute_s = self.table.n_blocks * _BLOCK_S + sum(
            tensor.n_bytes * share / self._decode_speed(tensor) for tensor, share in self.matrices()
        )
        if not plan.expert_blocks:
            return PassTime(compute_s, *self._read_dense(plan), hidden=1.0)
        missed = [
            (1 - routing.hit_rate(n_records)) * routing.n_blocks * routing.n_used
            for routing, n_records in zip(self.routings, plan.pool_records, strict=True)
        ]
        return PassTime(compute_s, *self._read_experts(plan, missed), hidden=_HIDDEN_MISSES)

    def prefill(self, plan: WeightsPlan) -> PassTime:
        """Return the pass of a physical batch of a prompt."""
        n = n_prefill(plan)
        compute_s = self._prefill_compute_s(n)
        if not plan.expert_blocks:
            return PassTime(compute_s, *self._read_dense(plan), hidden=1.0)
        missed = [
            _misses_of_batch(routing, n_records, n)
            for routing, n_records in zip(self.routings, plan.pool_records, strict=True)
        ]
        n_experts = max(block.n_experts for block in self.table.experts)
        hidden = 1.0 if n * self.table.n_used >= _ALL_CHOSEN * n_experts else _HIDDEN_MISSES
        return PassTime(compute_s, *self._read_experts(plan, missed), hidden=hidden)

    def hit_rate(self, plan: WeightsPlan) -> float:
        """Return the hit rate of all pools together."""
        choices = [routing.n_blocks * routing.n_used for routing in self.routings]
        rates = [
            routing.hit_rate(n_records)
            for routing, n_records in zip(self.routings, plan.pool_records, strict=True)
        ]
        return sum(n * rate for n, rate in zip(choices, rates, strict=True)) / sum(choices)

    def load_s(self, plan: WeightsPlan) -> float:
        """Return the seconds until all that stays in memory is there."""
        if plan.mode == "full-resident":  # llama.cpp maps the file
            size, depth = _READ_AHEAD_BYTES, _READ_AHEAD_DEPTH
        else:
            size, depth = PIECE_BYTES, N_IO_THREADS
        read_s = plan.resident_bytes / self.disk.bytes_per_s(size, depth, is_random=False)
        return read_s + plan.stream_bytes / self.profile.memory_bytes_per_s

    def limit(self, decode: PassTime) -> Limit:
        """Return what a token's pass waits for most."""
        if decode.read_s > decode.compute_s:
            return "disk"
        n_bytes = sum(tensor.n_bytes * share for tensor, share in self.matrices())
        is_fast = n_bytes >= _MEMORY_BOUND * self.profile.memory_bytes_per_s * decode.compute_s
        return "memory bandwidth" if is_fast else "compute"

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
        speed = self.disk.bytes_per_s(PIECE_BYTES, N_IO_THREADS, is_random=False)
        return n_bytes, n_bytes / speed

    def _read_experts(self, plan: WeightsPlan, n_missed: Iterable[float]) -> tuple[float, float]:
        """Return bytes and seconds of reading so many experts into each pool.

        At full depth: where a layer misses too few to fill the queue, the disk does not limit.
        """
        n_bytes = seconds = 0.0
        for pool, n in zip(plan.expert_blocks, n_missed, strict=True):
            for slice_bytes in pool[0].slice_bytes:
                piece = min(slice_bytes, PIECE_BYTES)
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
        if tensor.type_name in FLOATS and self.profile.kernel(tensor.type_name) is None:
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


def n_prefill(plan: WeightsPlan) -> int:
    """Return the tokens of a prompt that go through the weights at once."""
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
