"""How fast memory is read, and how fast weights of each type are used: measured, in seconds.

In: the number of threads, tensor types. Out: bytes and operations per second. The kernels are those
of llama.cpp: the CPU's for weights as files have them and for repacked ones, and those of GPUs.
Runs in a process of its own, alone.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt

from headrace.engine import ggml
from headrace.engine.errors import EngineError
from headrace.engine.ggml import Backend, Bytes, Graph, Operand
from headrace.engine.profile import CPU, GpuDevice, KernelSpeed

# Weights must come from memory, not from a cache: this many times what the caches hold.
_CACHES = 4
_LEAST_BYTES, _MOST_BYTES = 256 << 20, 1 << 30
# What caches GPUs have is not known; large enough, too, for starting the kernels not to count.
_GPU_BYTES = 2 << 30
# Activations and results of the largest graph here, for each time that its product is computed.
_ACTIVATION_BYTES = 24 << 20
# Working memory is a fourth of what is available: repacked weights, and the values from which they
# are made, may take as much each.
_MEMORY_PARTS = 4
_SLACK_BYTES = 4096
# Repacked weights have so many rows together, or a divisor of that.
_ROWS_TOGETHER = 16
_N_GPU_PRODUCTS = 8
_MEASURE_S = 0.25
_LEAST_RUNS = 2

# Llama 3 8B's block; a token's products are measured on all its shapes together.
_N_EMBD, _N_FF = 4096, 14336
# Qwen3-30B-A3B's experts.
_EXPERT_EMBD, _EXPERT_FF, _N_EXPERTS, _N_USED = 2048, 768, 128, 8
_N_TOKENS = 512
# Its attention, with a quarter of its heads.
_HEAD_DIM, _N_HEADS, _N_KV_HEADS = 128, 8, 2
# Rows that are quantised; all weights repeat them. On x86 ggml looks scales up in a table, so how
# many there are counts: with one scale for all, decode of Q4_0 was a quarter faster.
_N_SAMPLE_ROWS = 16


def working_memory(cache_bytes: int, available_bytes: int) -> Bytes:
    """Return memory to measure with: larger than the caches, a fraction of what is available.

    It is on huge pages, as that of streamed weights, and every page is there.

    Raises:
        EngineError: too little is available to measure anything.
    """
    n_bytes = max(_LEAST_BYTES, min(_CACHES * cache_bytes, _MOST_BYTES))
    n_bytes = min(n_bytes, available_bytes // _MEMORY_PARTS)
    if n_bytes < _ACTIVATION_BYTES:
        raise EngineError(
            f"{available_bytes} bytes of memory are available, measuring how fast weights are used"
            f" needs {_MEMORY_PARTS * _ACTIVATION_BYTES}"
        )
    mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    memory[:] = 1
    return memory


def memory_bytes_per_s(memory: Bytes, n_threads: int) -> float:
    """Return the speed at which n_threads threads together read memory."""
    words = memory[: memory.nbytes // 8 * 8].view(np.uint64)
    parts = np.array_split(words, n_threads)
    with ThreadPoolExecutor(n_threads) as pool:
        return words.nbytes / _seconds(lambda: list(pool.map(np.sum, parts)))


def attention_flops(cpu: Backend, n_threads: int) -> float:
    """Return the speed of the attention of a prompt's batch to itself, with a cache of F16."""
    kv_shape = (_HEAD_DIM, _N_TOKENS, _N_KV_HEADS)
    kv_bytes = 2 * prod(kv_shape) * 2 + _SLACK_BYTES
    graph = Graph(cpu, n_threads=n_threads, weights=kv_bytes, n_other_bytes=_ACTIVATION_BYTES)
    try:
        queries = graph.tensor(ggml.F32, _HEAD_DIM, _N_TOKENS, _N_HEADS)
        mask = graph.tensor(ggml.F16, _N_TOKENS, _N_TOKENS)
        keys, values = (graph.weight(ggml.F16, *kv_shape) for _ in range(2))
        queries.write(_normal(*queries.shape))
        mask.write(np.zeros(mask.shape, dtype=np.float16))
        for operand in (keys, values):
            operand.write(_normal(*kv_shape).astype(np.float16))
        graph.attend(queries, keys, values, mask)
        return 4 * prod(queries.shape) * _N_TOKENS / _seconds(graph.compute)
    finally:
        graph.close()


def gpu_devices(backends: Sequence[Backend], memory: Bytes) -> tuple[GpuDevice, ...]:
    """Return the GPUs of backends with their memory now, and how fast that is read."""
    sample = ggml.quantize(_normal(_N_SAMPLE_ROWS, _N_FF), ggml.F16)
    devices = []
    for backend in backends:
        if backend.is_gpu:
            free_bytes, total_bytes = backend.memory_bytes()
            bench = _Bench(backend, memory, 1, ggml.F16, sample)
            devices.append(
                GpuDevice(
                    backend.name, backend.description, total_bytes, free_bytes,
                    bench.measure(_decode_bytes_per_s), backend.is_integrated,
                )
            )  # fmt: skip
    return tuple(devices)


def kernel_speeds(
    backends: Sequence[Backend], memory: Bytes, name: str, type_id: int, n_threads: int
) -> list[KernelSpeed]:
    """Return how fast those of backends that can use weights of a type, by name and number, do."""
    sample = ggml.quantize(_normal(_N_SAMPLE_ROWS, _N_FF), type_id)
    found = []
    for backend in backends:
        bench = _Bench(backend, memory, n_threads, type_id, sample)
        if bench.measure(_is_supported):
            found.append(
                KernelSpeed(
                    type=name,
                    decode_bytes_per_s=bench.measure(_decode_bytes_per_s),
                    prefill_flops=bench.measure(_prefill_flops),
                    expert_prefill_flops=bench.measure(_expert_prefill_flops),
                    backend=backend.name,
                    expert_decode_bytes_per_s=bench.measure(_expert_decode_bytes_per_s),
                    load_bytes_per_s=bench.measure(_load_bytes_per_s, is_fresh=True),
                )
            )
    return found


class _Bench:
    """Graphs to be timed; their weights are of one type, and as large as there is room."""

    def __init__(
        self, backend: Backend, memory: Bytes, n_threads: int, type_id: int, sample: Bytes
    ) -> None:
        self._backend, self._memory, self._n_threads = backend, memory, n_threads
        self.type_id, self._sample = type_id, sample
        self._rows = sample
        # A GPU is done with one product before the next is there.
        self.n_products = _N_GPU_PRODUCTS if backend.is_gpu else 1

    def measure(self, measure: Callable[[_Bench], float], *, is_fresh: bool = False) -> float:
        """Return what measure finds with a graph that is empty before and gone afterwards.

        If is_fresh, memory for weights is what ggml takes for them, not touched before.
        """
        weights = self._weights()
        if is_fresh and not isinstance(weights, int):
            weights = weights.nbytes
        self.graph = Graph(
            self._backend, n_threads=self._n_threads, weights=weights,
            n_other_bytes=_ACTIVATION_BYTES * self.n_products,
        )  # fmt: skip
        try:
            return measure(self)
        finally:
            self.graph.close()

    def _weights(self) -> Bytes | int:
        if self._backend.is_gpu:
            return min(_GPU_BYTES, self._backend.memory_bytes()[0] // 2)
        return self._memory if self._backend.name == CPU else self._memory.nbytes

    def n_rows(self, k: int, m: int, n_experts: int = 1) -> int:
        """Return how many of m rows of a weight with k columns have room; m of each expert."""
        room = max(0, self.graph.free_bytes - _SLACK_BYTES)
        rows = room // (n_experts * ggml.row_bytes(self.type_id, k))
        return min(m, rows // _ROWS_TOGETHER * _ROWS_TOGETHER)

    def weight(self, *shape: int) -> Operand:
        """Return a weight of that shape."""
        weight = self.graph.weight(self.type_id, *shape)
        weight.write(self.rows(weight.n_bytes))
        return weight

    def rows(self, n_bytes: int) -> Bytes:
        """Return so many bytes of quantised values."""
        if n_bytes > self._rows.nbytes:
            self._rows = np.resize(self._sample, n_bytes)
        return self._rows[:n_bytes]

    def tokens(self, *shape: int) -> Operand:
        """Return activations of that shape."""
        tokens = self.graph.tensor(ggml.F32, *shape)
        tokens.write(_normal(*shape))
        return tokens


def _is_supported(bench: _Bench) -> bool:
    """Tell whether there are kernels for products with the weights, and with experts of them."""
    token, ids = bench.tokens(_N_EMBD, 1, 1), bench.graph.tensor(ggml.I32, 1, 1)
    graph, shape = bench.graph, (_N_EMBD, _ROWS_TOGETHER)
    weight, experts = (graph.weight(bench.type_id, *s) for s in (shape, (*shape, 2)))
    products = graph.mul_mat(weight, token), graph.mul_mat_id(experts, token, ids)
    return all(graph.supports(product) for product in products)


def _decode_bytes_per_s(bench: _Bench) -> float:
    token, wide_token = bench.tokens(_N_EMBD, 1), bench.tokens(_N_FF, 1)
    gate_or_up, down = (_N_EMBD, _N_FF, token), (_N_FF, _N_EMBD, wide_token)
    n_bytes = 0
    for k, m, activations in itertools.cycle((gate_or_up, gate_or_up, down)):
        n_rows = bench.n_rows(k, m)
        if n_rows == 0:
            break
        weight = bench.weight(k, n_rows)
        bench.graph.mul_mat(weight, activations)
        n_bytes += weight.n_bytes
    return n_bytes / _seconds(bench.graph.compute)


def _expert_decode_bytes_per_s(bench: _Bench) -> float:
    """Return the speed of one token's products with experts, of which none is used twice."""
    n_rows = bench.n_rows(_EXPERT_EMBD, _EXPERT_FF, _N_EXPERTS)
    experts = bench.weight(_EXPERT_EMBD, n_rows, _N_EXPERTS)
    token = bench.tokens(_EXPERT_EMBD, 1, 1)
    every = np.random.default_rng(1).permutation(_N_EXPERTS).astype(np.int32)
    for chosen in every.reshape(-1, _N_USED):
        ids = bench.graph.tensor(ggml.I32, _N_USED, 1)
        ids.write(chosen)
        bench.graph.mul_mat_id(experts, token, ids)
    return experts.n_bytes / _seconds(bench.graph.compute)


def _load_bytes_per_s(bench: _Bench) -> float:
    """Return the speed at which weights are written, until there is no room."""
    n_bytes, seconds = 0, 0.0
    while (n_rows := bench.n_rows(_N_EMBD, _N_FF)) > 0:
        weight = bench.graph.weight(bench.type_id, _N_EMBD, n_rows)
        rows = bench.rows(weight.n_bytes)
        seconds += _timed(partial(weight.write, rows))
        n_bytes += weight.n_bytes
    return n_bytes / seconds


def _prefill_flops(bench: _Bench) -> float:
    tokens = bench.tokens(_N_EMBD, _N_TOKENS)
    weight = bench.weight(_N_EMBD, bench.n_rows(_N_EMBD, _N_EMBD))
    for _ in range(bench.n_products):
        bench.graph.mul_mat(weight, tokens)
    n_flops = 2 * prod(weight.shape) * _N_TOKENS * bench.n_products
    return n_flops / _seconds(bench.graph.compute)


def _expert_prefill_flops(bench: _Bench) -> float:
    tokens = bench.tokens(_EXPERT_EMBD, 1, _N_TOKENS)
    ids = bench.graph.tensor(ggml.I32, _N_USED, _N_TOKENS)
    every = np.tile(np.arange(_N_EXPERTS, dtype=np.int32), (_N_TOKENS, 1))
    ids.write(np.random.default_rng(1).permuted(every, axis=1)[:, :_N_USED])
    n_rows = bench.n_rows(_EXPERT_EMBD, _EXPERT_FF, _N_EXPERTS)
    experts = bench.weight(_EXPERT_EMBD, n_rows, _N_EXPERTS)
    for _ in range(bench.n_products):
        bench.graph.mul_mat_id(experts, tokens, ids)
    n_flops = 2 * prod(experts.shape[:2]) * _N_USED * _N_TOKENS * bench.n_products
    return n_flops / _seconds(bench.graph.compute)


def _normal(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def _seconds(run: Callable[[], object]) -> float:
    """Return the least duration of run: whatever else the machine does only adds to it."""
    first = _timed(run)  # threads start, pages come
    if first > _MEASURE_S:
        return first
    until = time.perf_counter() + _MEASURE_S
    durations: list[float] = []
    while time.perf_counter() < until or len(durations) < _LEAST_RUNS:
        durations.append(_timed(run))
    return min(durations)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
