"""How long a forward pass of a planned model takes: its arithmetic, its reads, and their overlap.

In: what was measured of the machine, a model's tensors, what was learnt of its experts, a plan.
Out: a PassTime, and the parts that it is made of, for those who look for the best plan. Pure;
knows neither how plans are made nor what is told of them.

A pass takes the longer of its arithmetic and its reads, as far as the two overlap, and their sum as
far as they don't. Figures are those of one sequence with a short context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.engine.errors import EngineError
from headrace.engine.gguf import Tensor
from headrace.engine.messages import Limit
from headrace.engine.plan import WeightsPlan
from headrace.engine.profile import CPU, DiskProfile, GpuDevice, KernelSpeed, Profile
from headrace.engine.routing import ExpertUsage, HitCurve, Routing
from headrace.engine.tensors import BLOCK, ExpertBlock, TensorTable

Place = Literal["vram", "ram", "lent", "stream"]
"""Where the weights of a product are.

Those in memory are repacked, but for those that a GPU may take for a batch: they are lent, as they
are in the file. So are those that are streamed, and read first.
"""

N_PROMPT = 1000
# Tokens before the one that a decode pass is of, whose keys and values it reads; 2 bytes each.
N_CONTEXT, _KV_VALUE_BYTES = 512, 2
_KV_WEIGHTS = ("attn_k.weight", "attn_v.weight")
# native/readers.h, READERS_PIECE_BYTES
PIECE_BYTES = 1 << 20
# Linux reads mapped files ahead by 128 KiB, one window while the one before is used.
_READ_AHEAD_BYTES, _READ_AHEAD_DEPTH = 128 << 10, 2
# From so many tokens on a GPU takes weights from memory: ggml-cuda.cu, GGML_OP_OFFLOAD_MIN_BATCH.
_LENT_BATCH = 32
# What of the reads of missed experts is hidden behind arithmetic. Where the two took about as long,
# others gained 5 to 17 % by guessing the next layer's experts, 9 to 24 % by computing what is there
# while the rest is read; the low ends give a quarter. So did a MoE of 24 x 128 experts in 6, 4 and
# 3 GiB: 0.25, 0.25 and 0.28, though guesses caught two of three to nine of ten misses: they are
# made a layer ahead, and most come late.
HIDDEN_MISSES = 0.25
# Of reads through the ring: all that the arithmetic takes.
HIDDEN_DENSE = 1.0
# native/callback.c, ALL_CHOSEN: from so many choices for each expert on layers are read ahead whole
_ALL_CHOSEN = 3
# Of a block's operations beside its products with weights, and of the threads that wait for each
# other between them. SmolLM2's 30 blocks: 7.4 ms for a token, 6.0 of them for products.
BLOCK_S = 50e-6
# Of a product with streamed experts, three a layer: the graph stops for them, its threads end and
# start again, and the next layer's experts are guessed. The same MoE with all of them cached: 43.9
# ms a token, 36.9 of them for all else here.
STOP_S = 100e-6
# Of a layer on a GPU, for what of it the CPU computes: the activations go there and back, some KB
# each, both wait, and the CPU's threads start. An H200 beside 16 threads: 9.6 ms a token with the
# experts of 14 layers in memory, 5.5 of them for all else here.
HOP_S = 290e-6
# Of llama.cpp's code, header, vocabulary, plan and context, with 50,000 tokens.
_START_S = 0.08
# Of what reading memory alone reaches: kernels that are that fast wait for memory.
_MEMORY_BOUND = 0.7
# Rows are picked out of these, they are no matrices to multiply with.
LOOKED_UP = frozenset({
    "token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"
})  # fmt: skip
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"
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
        return float(overlapped(self.compute_s, self.read_s, self.hidden))


def overlapped(
    compute_s: npt.NDArray[np.float64] | float, read_s: npt.NDArray[np.float64] | float,
    hidden: float,
) -> npt.NDArray[np.float64]:  # fmt: skip
    """Return the seconds of passes of which a share of the reads is hidden."""
    seconds = np.maximum(compute_s, np.multiply(hidden, read_s)) + np.multiply(1 - hidden, read_s)
    return np.asarray(seconds, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class LoadTime:
    """How a model is loaded: what is read for it, and all else, in seconds."""

    read_bytes: float
    read_s: float
    other_s: float

    def seconds(self, correction: float = 1.0, read_bytes: float | None = None) -> float:
        """Return how long it takes; read_bytes, if known, came from the disk and not its cache.

        correction is that of the speed of all else.
        """
        share = 1.0 if read_bytes is None else min(read_bytes / self.read_bytes, 1.0)
        return share * self.read_s + self.other_s / correction


@dataclass(frozen=True, slots=True)
class CostModel:
    """A model's tensors and routers, with the speeds of the machine that it is to run on."""

    profile: Profile
    disk: DiskProfile
    table: TensorTable
    gpu: GpuDevice | None
    """The one that plans may use."""
    n_io_threads: int
    """Reads in flight that the disk asks for."""
    routings: tuple[Routing, ...]
    """Of each pool of the table."""
    curves: tuple[HitCurve, ...]
    """Likewise."""
    is_learnt: bool
    """Whether the routings are; else they are a prior."""

    @classmethod
    def of(
        cls, profile: Profile, disk: DiskProfile, table: TensorTable, usage: ExpertUsage | None
    ) -> CostModel:
        """Return the model of table with what was learnt of its experts.

        Raises:
            EngineError: the profile has no kernels.
        """
        if all(kernel.backend != "CPU" for kernel in profile.kernels):
            raise EngineError("the hardware profile has no kernel speeds, expected one at least")
        routings = tuple(_routings(table, usage))
        curves = tuple(routing.hit_curve() for routing in routings)
        gpu = _usable_gpu(profile)
        slices = Counter(n for block in table.experts for n in block.slice_bytes)
        request_bytes = min(slices.most_common(1)[0][0] if slices else PIECE_BYTES, PIECE_BYTES)
        n_io_threads = disk.reads_in_flight(request_bytes)
        is_learnt = usage is not None
        return cls(profile, disk, table, gpu, n_io_threads, routings, curves, is_learnt)

    def decode(
        self, plan: WeightsPlan, read_bytes: float | None = None, n_context: int = N_CONTEXT
    ) -> PassTime:
        """Return the pass of one token; of one that read so much of its experts, if that is known.

        Else it is what the hit curve says.
        """
        places = _Places.of(plan, self.table)
        compute_s = self.table.n_blocks * BLOCK_S + places.n_hops * HOP_S
        compute_s += self.context_s(plan.n_gpu_layers, n_context) + sum(
            self.product_s(tensor, share, places.of_matrix(tensor))
            for tensor, share in self.matrices()
        )
        if not plan.expert_blocks:
            return PassTime(compute_s, *self._read_dense(plan), hidden=HIDDEN_DENSE)
        pools = self._pools(plan)
        if read_bytes is None:
            missed = [(1 - pool.hit_rate(pool.n_records)) * pool.n_choices for pool in pools]
            return PassTime(compute_s, *self._read_experts(plan, missed), hidden=HIDDEN_MISSES)
        all_bytes, all_s = self._read_experts(plan, [pool.n_choices for pool in pools])
        read_s = all_s * read_bytes / all_bytes
        return PassTime(compute_s, read_bytes, read_s, hidden=HIDDEN_MISSES)

    def prompt_s(self, plan: WeightsPlan, n_tokens: int) -> float:
        """Return the seconds of a prompt: of whole physical batches, and of one with the rest."""
        n_batches, n_rest = divmod(n_tokens, n_prefill(plan))
        seconds = n_batches * self.prefill(plan).seconds
        return seconds + (self.prefill(plan, n_rest).seconds if n_rest else 0.0)

    def prefill(self, plan: WeightsPlan, n_tokens: int = 0) -> PassTime:
        """Return the pass of n_tokens of a prompt; 0: of a whole physical batch."""
        n = n_tokens or n_prefill(plan)
        compute_s = self._prefill_compute_s(n, _Places.of(plan, self.table))
        if not plan.expert_blocks:
            return PassTime(compute_s, *self._read_dense(plan), hidden=HIDDEN_DENSE)
        missed = [pool.misses_of_batch(n) for pool in self._pools(plan)]
        n_experts = max(block.n_experts for block in self.table.experts)
        hidden = 1.0 if n * self.table.n_used >= _ALL_CHOSEN * n_experts else HIDDEN_MISSES
        return PassTime(compute_s, *self._read_experts(plan, missed), hidden=hidden)

    def hit_rate(self, plan: WeightsPlan) -> float:
        """Return the hit rate of all pools together."""
        pools = self._pools(plan)
        hits = sum(pool.n_choices * pool.hit_rate(pool.n_records) for pool in pools)
        return hits / sum(pool.n_choices for pool in pools)

    def load(self, plan: WeightsPlan) -> LoadTime:
        """Return what it takes until all that stays in memory is there."""
        n_bytes = plan.resident_bytes + sum(tensor.n_bytes for tensor in plan.in_vram)
        if plan.mode == "full-resident":  # llama.cpp maps the file, and waits for its pages
            speed = self.disk.bytes_per_s(_READ_AHEAD_BYTES, _READ_AHEAD_DEPTH, is_random=False)
            return LoadTime(n_bytes, n_bytes / speed, _START_S + self._copy_s(plan))
        touch_s = plan.stream_bytes / self.profile.memory_bytes_per_s
        other_s = _START_S + self._copy_s(plan) + touch_s
        return LoadTime(n_bytes, self.dense_read_s(n_bytes), other_s)

    def _copy_s(self, plan: WeightsPlan) -> float:
        """Return the seconds of bringing what was read to where it stays.

        What is mapped stays where it is unless it is repacked; all else goes through a buffer.
        """
        places, is_mapped = _Places.of(plan, self.table), plan.mode == "full-resident"
        seconds = 0.0
        for tensor in self.table.tensors:
            place = places.of_matrix(tensor)
            backends = [] if is_mapped else [CPU]
            backend = self._backend(tensor.type_name, place)
            backends += [] if is_mapped and backend == CPU else [backend]
            for kernel in (self.profile.kernel(tensor.type_name, each) for each in backends):
                if place != "stream" and kernel is not None and kernel.load_bytes_per_s:
                    seconds += tensor.n_bytes / kernel.load_bytes_per_s
        return seconds

    def limit(self, plan: WeightsPlan, decode: PassTime) -> Limit:
        """Return what a token's pass waits for most."""
        if decode.read_s > decode.compute_s:
            return "disk"
        places = _Places.of(plan, self.table)
        memory_s = sum(
            tensor.n_bytes * share / self._memory_speed(places.of_matrix(tensor))
            for tensor, share in self.matrices()
        )
        return "memory bandwidth" if memory_s >= _MEMORY_BOUND * decode.compute_s else "compute"

    def matrices(self) -> Iterable[tuple[Tensor, float]]:
        """Yield the tensors that a token is multiplied with, and the share of each that is used."""
        for tensor in self.table.trunk:
            if is_matrix(tensor, self.table):
                yield tensor, 1.0
        for item in self.table.dense:
            yield item.tensor, 1.0
        for block in self.table.experts:
            for part in block.parts:
                yield part, min(self.table.n_used / block.n_experts, 1.0)

    def context_s(self, n_gpu_layers: int, n_context: int = N_CONTEXT) -> float:
        """Return the seconds in which a token's pass reads keys and values of n_context others."""
        first = self.table.n_blocks + 1 - n_gpu_layers if n_gpu_layers else self.table.n_blocks
        seconds = 0.0
        for tensor in self.table.trunk:
            if tensor.name.endswith(_KV_WEIGHTS) and (match := BLOCK.match(tensor.name)):
                n_bytes = n_context * _KV_VALUE_BYTES * tensor.shape[1]
                place: Place = "vram" if int(match[1]) >= first else "ram"
                seconds += n_bytes / self._memory_speed(place)
        return seconds

    def is_measured(self, type_name: str, plan: WeightsPlan) -> bool:
        """Tell whether the kernels of a type were measured wherever plan may use them."""
        backends = ("CPU", self.gpu.name) if plan.gpu and self.gpu else ("CPU",)
        return all(self.profile.kernel(type_name, backend) is not None for backend in backends)

    def product_s(self, tensor: Tensor, share: float, place: Place) -> float:
        """Return the seconds of one token's product with a share of tensor."""
        seconds = tensor.n_bytes * share / self._decode_speed(tensor, place)
        return seconds + STOP_S if place == "stream" and is_expert(tensor) else seconds

    def dense_read_s(self, n_bytes: float) -> float:
        """Return the seconds of reading so much through the ring."""
        return n_bytes / self.disk.bytes_per_s(PIECE_BYTES, self.n_io_threads, is_random=False)

    def expert_read_s(self, block: ExpertBlock) -> float:
        """Return the seconds of reading one expert of block.

        At full depth: where a layer misses too few to fill the queue, the disk does not limit.
        """
        return sum(
            n / self.disk.bytes_per_s(min(n, PIECE_BYTES), self.n_io_threads, is_random=True)
            for n in block.slice_bytes
        )

    def _pools(self, plan: WeightsPlan) -> list[_Pool]:
        """Return the pools of records that plan has."""
        of_shape = {pool[0].shape: i for i, pool in enumerate(self.table.pools)}
        return [
            _Pool(self.routings[i], self.curves[i], len(blocks), n_records)
            for blocks, n_records in zip(plan.expert_blocks, plan.pool_records, strict=True)
            for i in [of_shape[blocks[0].shape]]
        ]

    def _prefill_compute_s(self, n_tokens: int, places: _Places) -> float:
        """Return the arithmetic of n_tokens: no product is faster than going through its weights.

        Of the output only the last token's row is asked for.
        """
        seconds = 0.0
        for tensor in (*self.table.trunk, *(item.tensor for item in self.table.dense)):
            if len(tensor.shape) > 1 and tensor.name not in LOOKED_UP | {OUTPUT}:
                place = places.of_matrix(tensor)
                seconds += self._batch_product_s(tensor, n_tokens, 1.0, place, n_tokens)
        seconds += n_tokens * self._attention_s(places)
        for pool, routing in zip(self.table.pools, self.routings, strict=True):
            touched = routing.n_distinct(n_tokens) / routing.n_experts
            n_products = n_tokens * routing.n_used / pool[0].n_experts
            for part in (part for block in pool for part in block.parts):
                place = places.of_matrix(part)
                seconds += self._batch_product_s(part, n_products, touched, place, n_tokens)
        return seconds

    def _batch_product_s(
        self, tensor: Tensor, n_products: float, touched: float, place: Place, n_tokens: int
    ) -> float:
        """Return the seconds of a batch's products with what it touches of tensor."""
        lent_s = 0.0
        gpu = None if self.gpu is None else self.profile.kernel(tensor.type_name, self.gpu.name)
        if place == "lent" and n_tokens >= _LENT_BATCH and gpu and gpu.load_bytes_per_s:
            lent_s = tensor.n_bytes * touched / gpu.load_bytes_per_s
            place = "vram"
        kernel = self._kernel(tensor.type_name, place)
        flops = kernel.expert_prefill_flops if is_expert(tensor) else kernel.prefill_flops
        arithmetic_s = 2 * tensor.n_elements * n_products / flops
        return lent_s + max(arithmetic_s, self.product_s(tensor, touched, place))

    def _attention_s(self, places: _Places) -> float:
        """Return the seconds that the CPU takes for a token's attention, to half of a prompt."""
        if not self.profile.attention_flops:
            return 0.0
        queries = (tensor for tensor in self.table.trunk if tensor.name.endswith("attn_q.weight"))
        n_values = sum(t.shape[1] for t in queries if places.of_matrix(t) != "vram")
        return 4 * n_values * N_PROMPT / 2 / self.profile.attention_flops

    def _read_dense(self, plan: WeightsPlan) -> tuple[float, float]:
        """Return bytes and seconds of what a pass streams through the ring."""
        n_bytes = sum(tensor.n_bytes for tensor in plan.streamed)
        return n_bytes, self.dense_read_s(n_bytes)

    def _read_experts(self, plan: WeightsPlan, n_missed: Iterable[float]) -> tuple[float, float]:
        """Return bytes and seconds of reading so many experts into each pool."""
        n_bytes = seconds = 0.0
        for pool, n in zip(plan.expert_blocks, n_missed, strict=True):
            n_bytes += n * sum(pool[0].slice_bytes)
            seconds += n * self.expert_read_s(pool[0])
        return n_bytes, seconds

    def _kernel(self, type_name: str, place: Place) -> KernelSpeed:
        """Return the speed of a type at a place; of one not measured, the slowest that was."""
        backend = self._backend(type_name, place)
        kernels = [kernel for kernel in self.profile.kernels if kernel.backend == backend]
        return self.profile.kernel(type_name, backend) or KernelSpeed(
            type=type_name,
            decode_bytes_per_s=min(kernel.decode_bytes_per_s for kernel in kernels),
            prefill_flops=min(kernel.prefill_flops for kernel in kernels),
            expert_prefill_flops=min(kernel.expert_prefill_flops for kernel in kernels),
            backend=backend,
            expert_decode_bytes_per_s=min(kernel.expert_decode_bytes_per_s for kernel in kernels),
        )

    def _backend(self, type_name: str, place: Place) -> str:
        """Return whose kernel is used: only what stays in memory can be repacked."""
        if place == "vram" and self.gpu is not None:
            return self.gpu.name
        is_repacked = place == "ram" and self.profile.kernel(type_name, "CPU_REPACK") is not None
        return "CPU_REPACK" if is_repacked else "CPU"

    def _decode_speed(self, tensor: Tensor, place: Place) -> float:
        """Return the weight bytes a second of one token: not more than come from memory."""
        memory = self._memory_speed(place)
        backend = self._backend(tensor.type_name, place)
        if tensor.type_name in FLOATS and self.profile.kernel(tensor.type_name, backend) is None:
            return memory
        kernel = self._kernel(tensor.type_name, place)
        speed = kernel.decode_bytes_per_s
        if is_expert(tensor):
            speed = kernel.expert_decode_bytes_per_s or speed
        speed = min(speed, memory)
        if place in ("ram", "vram"):
            return speed
        # Whatever was measured, no weights are streamed or lent only for another kernel's sake.
        return min(speed, self._decode_speed(tensor, "ram"))

    def _memory_speed(self, place: Place) -> float:
        """Return the bytes a second of the memory at a place; of a GPU's, as far as is known."""
        if place != "vram" or self.gpu is None:
            return self.profile.memory_bytes_per_s
        kernels = (k for k in self.profile.kernels if k.backend == self.gpu.name)
        return self.gpu.memory_bytes_per_s or max(kernel.decode_bytes_per_s for kernel in kernels)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a plan has the weights; n_hops as HOP_S counts them."""

    in_vram: frozenset[str]
    streamed: frozenset[str]
    others: Place
    """Of all that is in neither."""
    n_hops: int

    @classmethod
    def of(cls, plan: WeightsPlan, table: TensorTable) -> _Places:
        in_vram = frozenset(tensor.name for tensor in plan.in_vram)
        first = table.n_blocks + 1 - plan.n_gpu_layers
        units = [(item.block, item.tensor) for item in table.dense]
        units += [(block.block, block.parts[0]) for block in table.experts]
        n_hops = sum(block >= first and tensor.name not in in_vram for block, tensor in units)
        streamed = frozenset(tensor.name for tensor in plan.streamed)
        lends = plan.gpu and plan.mode == "full-resident"
        return cls(in_vram, streamed, "lent" if lends else "ram", n_hops if plan.gpu else 0)

    def of_matrix(self, tensor: Tensor) -> Place:
        if tensor.name in self.in_vram:
            return "vram"
        return "stream" if tensor.name in self.streamed else self.others


@dataclass(frozen=True, slots=True)
class _Pool:
    """Records of n_blocks blocks of those that routing and curve are of."""

    routing: Routing
    curve: HitCurve
    n_blocks: int
    n_records: int

    @property
    def n_choices(self) -> float:
        """Experts that one token uses."""
        return self.n_blocks * self.routing.n_used

    def hit_rate(self, n_records: float) -> float:
        return float(self.curve.hit_rate(n_records * self.routing.n_blocks / self.n_blocks))

    def misses_of_batch(self, n_tokens: int) -> float:
        """Return the experts that a batch has to have read.

        It goes through the layers once: a cache that can't hold all that it uses keeps nothing
        until the next batch comes to the same layer.
        """
        distinct = self.routing.n_distinct(n_tokens) * self.n_blocks / self.routing.n_blocks
        if self.n_records < distinct:
            return distinct
        return min(distinct, (1 - self.hit_rate(self.n_records)) * n_tokens * self.n_choices)


def is_expert(tensor: Tensor) -> bool:
    """Tell whether a matrix is one of each expert of a block."""
    return len(tensor.shape) > 2


def is_matrix(tensor: Tensor, table: TensorTable) -> bool:
    """Tell whether a tensor of the trunk is multiplied with; one that is tied is the output too."""
    is_tied = tensor.name == EMBEDDING and all(other.name != OUTPUT for other in table.trunk)
    return is_tied or tensor.name not in LOOKED_UP


def n_prefill(plan: WeightsPlan) -> int:
    """Return the tokens of a prompt that go through the weights at once."""
    return min(plan.n_ubatch, N_PROMPT)


def _usable_gpu(profile: Profile) -> GpuDevice | None:
    """Return the GPU with most free memory of those whose kernels were measured, if any."""
    measured = {kernel.backend for kernel in profile.kernels}
    gpus = [gpu for gpu in profile.gpus if gpu.name in measured and not gpu.is_integrated]
    return max(gpus, key=lambda gpu: gpu.free_bytes, default=None)


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
