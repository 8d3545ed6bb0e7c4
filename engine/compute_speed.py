"""How fast memory is read, and how fast weights of each type are used: measured, in seconds.

In: the number of threads, tensor types. Out: bytes and operations per second. The kernels are those
of llama.cpp on the CPU, with weights that are not repacked. Runs in a process of its own, alone.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
import numpy.typing as npt

from headrace.engine import ggml
from headrace.engine.errors import EngineError
from headrace.engine.ggml import Bytes, Graph, Operand
from headrace.engine.profile import KernelSpeed

# Weights must come from memory, not from a cache: this many times what the caches hold.
_CACHES = 4
_LEAST_BYTES, _MOST_BYTES = 256 << 20, 1 << 30
# Beside the weights: activations and results of the largest graph here, what alignment wastes.
_ACTIVATION_BYTES = 32 << 20
_SLACK_BYTES = 4096
_MEASURE_S = 0.4
_LEAST_RUNS = 2

# Llama 3 8B's block; a token's products are measured on all its shapes together.
_N_EMBD, _N_FF = 4096, 14336
# Qwen3-30B-A3B's experts.
_EXPERT_EMBD, _EXPERT_FF, _N_EXPERTS, _N_USED = 2048, 768, 128, 8
_N_TOKENS = 512
# Rows that are quantised; all weights repeat them. On x86 ggml looks scales up in a table, so how
# many there are counts: with one scale for all, decode of Q4_0 was a quarter faster.
_N_SAMPLE_ROWS = 16


def working_memory(cache_bytes: int, available_bytes: int) -> Bytes:
    """Return memory to measure with: larger than the caches, a fraction of what is available.

    It is on huge pages, as that of streamed weights, and every page is there.

    Raises:
        EngineError: too little is available to measure anything.
    """
    n_bytes = max(_LEAST_BYTES, min(_CACHES * cache_bytes, _MOST_BYTES)) + _ACTIVATION_BYTES
    n_bytes = min(n_bytes, available_bytes // 2)
    if n_bytes < 2 * _ACTIVATION_BYTES:
        raise EngineError(
            f"{available_bytes} bytes of memory are available, measuring how fast weights are used"
            f" needs {4 * _ACTIVATION_BYTES}"
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


def kernel_speed(memory: Bytes, name: str, type_id: int, n_threads: int) -> KernelSpeed:
    """Return how fast n_threads threads use weights of the type with that name and number."""
    sample = ggml.quantize(_normal(_N_SAMPLE_ROWS, _N_FF), type_id)
    measures = (_decode_bytes_per_s, _prefill_flops, _expert_prefill_flops)
    speeds = []
    for measure in measures:
        bench = _Bench(memory, n_threads, type_id, sample)
        try:
            speeds.append(measure(bench))
        finally:
            bench.graph.close()
    decode_bytes_per_s, prefill_flops, expert_prefill_flops = speeds
    return KernelSpeed(name, decode_bytes_per_s, prefill_flops, expert_prefill_flops)


class _Bench:
    """A graph to be timed; its weights are of one type, and as large as there is room."""

    def __init__(self, memory: Bytes, n_threads: int, type_id: int, sample: Bytes) -> None:
        self.graph = Graph(memory, n_threads)
        self._type_id, self._sample = type_id, sample

    def n_rows(self, k: int, m: int, n_experts: int = 1, n_results: int = 1) -> int:
        """Return how many of m rows of a weight with k columns have room; m of each expert.

        n_results is the number of values that follow from one row.
        """
        row_bytes = n_experts * ggml.row_bytes(self._type_id, k) + n_results * 4
        return min(m, max(0, self.graph.free_bytes - _SLACK_BYTES) // row_bytes)

    def weight(self, *shape: int) -> Operand:
        """Return a weight of that shape."""
        weight = self.graph.tensor(self._type_id, *shape)
        sample, data = self._sample, weight.data
        n_whole = data.nbytes // sample.nbytes * sample.nbytes
        data[:n_whole].reshape(-1, sample.nbytes)[:] = sample
        data[n_whole:] = sample[: data.nbytes - n_whole]
        return weight

    def tokens(self, *shape: int) -> Operand:
        """Return activations of that shape."""
        tokens = self.graph.tensor(ggml.F32, *shape)
        tokens.data.view(np.float32)[:] = _normal(tokens.data.nbytes // 4)
        return tokens


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
        n_bytes += weight.data.nbytes
    return n_bytes / _seconds(bench.graph.compute)


def _prefill_flops(bench: _Bench) -> float:
    tokens = bench.tokens(_N_EMBD, _N_TOKENS)
    weight = bench.weight(_N_EMBD, bench.n_rows(_N_EMBD, _N_EMBD, n_results=_N_TOKENS))
    bench.graph.mul_mat(weight, tokens)
    return 2 * prod(weight.shape) * _N_TOKENS / _seconds(bench.graph.compute)


def _expert_prefill_flops(bench: _Bench) -> float:
    tokens = bench.tokens(_EXPERT_EMBD, 1, _N_TOKENS)
    ids = bench.graph.tensor(ggml.I32, _N_USED, _N_TOKENS)
    every = np.tile(np.arange(_N_EXPERTS, dtype=np.int32), (_N_TOKENS, 1))
    chosen = np.random.default_rng(1).permuted(every, axis=1)[:, :_N_USED]
    ids.data.view(np.int32)[:] = chosen.ravel()
    n_results = _N_USED * _N_TOKENS
    n_rows = bench.n_rows(_EXPERT_EMBD, _EXPERT_FF, _N_EXPERTS, n_results)
    experts = bench.weight(_EXPERT_EMBD, n_rows, _N_EXPERTS)
    bench.graph.mul_mat_id(experts, tokens, ids)
    return 2 * prod(experts.shape[:2]) * n_results / _seconds(bench.graph.compute)


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
