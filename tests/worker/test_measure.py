"""Measuring: products that are what they should be, reads that stay in the file, one profile."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import quants
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import ggml
from headrace.engine.compute_speed import gpu_devices, kernel_speeds, working_memory
from headrace.engine.disk import DEPTHS
from headrace.engine.disk_speed import Reads, measure_disk, measure_reads
from headrace.engine.errors import EngineDied, EngineError, ModelFileError
from headrace.engine.gguf import read_model
from headrace.engine.hardware import this_machine
from headrace.engine.profile import CPU
from headrace.engine.profiling import cached_profile, measured_profile, weight_types

KIB, MIB = 1024, 1024**2


@pytest.fixture
def graph(backend: None) -> Iterator[ggml.Graph]:
    """A graph over enough memory for small products."""
    memory = np.zeros(MIB + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    cpu = ggml.list_backends()[0]
    graph = ggml.Graph(cpu, n_threads=2, weights=memory[start : start + MIB], n_other_bytes=MIB)
    yield graph
    graph.close()


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert psutil.Process().children(recursive=True) == []


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q8_0])
def test_product_is_that_of_the_matrices(graph: ggml.Graph, kind: Q) -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal((96, 64), dtype=np.float32)
    tokens = random.standard_normal((3, 64), dtype=np.float32)
    weight, operand = graph.weight(int(kind), 64, 96), graph.tensor(ggml.F32, 64, 3)
    weight.write(ggml.quantize(weights, int(kind)))
    operand.write(tokens)
    result = graph.mul_mat(weight, operand)
    graph.compute()
    assert result.read().reshape(3, 96) == pytest.approx(tokens @ weights.T, abs=0.3)


def test_product_with_experts_is_that_of_the_chosen_ones(graph: ggml.Graph) -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal((5, 32, 64), dtype=np.float32)
    tokens = random.standard_normal((3, 64), dtype=np.float32)
    ids = np.array([[4, 0], [2, 3], [1, 4]], dtype=np.int32)
    experts, operand = graph.weight(ggml.F32, 64, 32, 5), graph.tensor(ggml.F32, 64, 1, 3)
    chosen = graph.tensor(ggml.I32, 2, 3)
    for tensor, values in ((experts, weights), (operand, tokens), (chosen, ids)):
        tensor.write(values)
    result = graph.mul_mat_id(experts, operand, chosen)
    graph.compute()
    found = result.read().reshape(3, 2, 32)
    assert found == pytest.approx(np.einsum("nuok,nk->nuo", weights[ids], tokens), abs=1e-3)


def test_attention_is_the_average_of_the_values_that_queries_choose(graph: ggml.Graph) -> None:
    random = np.random.default_rng(1)
    d, n, m, n_heads, n_kv_heads = 64, 3, 32, 4, 2
    q, k, v = (
        random.standard_normal(shape, dtype=np.float32)
        for shape in ((n_heads, n, d), (n_kv_heads, m, d), (n_kv_heads, m, d))
    )
    queries, mask = graph.tensor(ggml.F32, d, n, n_heads), graph.tensor(ggml.F16, m, n)
    keys, values = (graph.weight(ggml.F16, d, m, n_kv_heads) for _ in range(2))
    for operand, data in ((queries, q), (keys, k.astype(np.float16)), (values, v.astype("f2"))):
        operand.write(data)
    mask.write(np.zeros((n, m), dtype=np.float16))
    result = graph.attend(queries, keys, values, mask)
    graph.compute()
    k, v = (np.repeat(x, n_heads // n_kv_heads, axis=0) for x in (k, v))
    weights = np.exp(q @ k.transpose(0, 2, 1) / d**0.5)
    expected = weights / weights.sum(axis=2, keepdims=True) @ v
    found = result.read().reshape(n, n_heads, d)
    assert found == pytest.approx(expected.transpose(1, 0, 2), abs=0.02)


def test_product_of_every_backend_is_that_of_the_matrices(backend: None) -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal((96, 256), dtype=np.float32)
    tokens = random.standard_normal((3, 256), dtype=np.float32)
    expected = tokens @ quants.dequantize(quants.quantize(weights, Q.Q4_0), Q.Q4_0).T
    backends = ggml.list_backends()
    assert backends[0].name == CPU
    for each in backends:
        graph = ggml.Graph(each, n_threads=2, weights=MIB, n_other_bytes=MIB)
        weight, operand = graph.weight(int(Q.Q4_0), 256, 96), graph.tensor(ggml.F32, 256, 3)
        result = graph.mul_mat(weight, operand)
        if graph.supports(result):
            weight.write(quants.quantize(weights, Q.Q4_0))
            operand.write(tokens)
            graph.compute()
            # GPUs round what they multiply with in other ways.
            near = pytest.approx(expected, abs=1.0 if each.is_gpu else 0.5)
            assert result.read().reshape(3, 96) == near, each
        graph.close()


def test_more_memory_than_there_is_for_weights_is_an_error(backend: None) -> None:
    cpu = ggml.list_backends()[0]
    with pytest.raises(EngineError, match="can't allocate 4611686018427387904 bytes to measure"):
        ggml.Graph(cpu, n_threads=1, weights=1 << 62, n_other_bytes=MIB)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_XXS", "MXFP4", "BF16"])
def test_rows_are_quantised_to_their_type(backend: None, name: str) -> None:
    values = np.random.default_rng(1).standard_normal((2, 512), dtype=np.float32)
    data = ggml.quantize(values, int(Q[name]))
    assert data.nbytes == 2 * ggml.row_bytes(int(Q[name]), 512)
    found = quants.dequantize(data.reshape(2, -1), Q[name])
    assert np.corrcoef(found.ravel(), values.ravel())[0, 1] > 0.8


def test_devices_have_no_more_free_memory_than_memory(backend: None) -> None:
    for each in ggml.list_backends():
        free_bytes, total_bytes = each.memory_bytes()
        assert 0 <= free_bytes <= total_bytes


def test_type_that_can_t_be_repacked_has_the_kernel_of_plain_weights_alone(backend: None) -> None:
    backends = ggml.list_backends()
    memory = working_memory(0, 200 * MIB)
    speeds = kernel_speeds(backends, memory, "F16", ggml.F16, 2)
    assert {speed.backend for speed in speeds} <= {CPU, *(b.name for b in backends if b.is_gpu)}
    [plain] = [speed for speed in speeds if speed.backend == CPU]
    assert plain.type == "F16"
    assert min(plain.decode_bytes_per_s, plain.prefill_flops, plain.expert_prefill_flops) > 0


def test_every_gpu_and_no_other_backend_is_a_device(backend: None) -> None:
    backends = ggml.list_backends()
    devices = gpu_devices(backends, working_memory(0, 200 * MIB))
    assert [device.name for device in devices] == [b.name for b in backends if b.is_gpu]
    assert all(device.memory_bytes_per_s > 0 for device in devices)


def test_working_memory_is_larger_than_the_caches_and_leaves_most() -> None:
    assert working_memory(100 * MIB, 10**12).nbytes == 400 * MIB
    assert working_memory(100 * MIB, 400 * MIB).nbytes == 100 * MIB


def test_too_little_memory_to_measure_is_an_error() -> None:
    with pytest.raises(EngineError, match="1048576 bytes of memory are available"):
        working_memory(0, MIB)


def test_disk_is_measured_in_both_orders_at_every_depth(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(16 * MIB))
    seen: list[tuple[int, int]] = []
    disk = measure_disk(path, lambda done, total: seen.append((done, total)))
    expected = [(size, depth) for depth in DEPTHS for size in (64 * KIB, 256 * KIB)]
    for points in (disk.sequential, disk.random):
        assert [(point.request_bytes, point.depth) for point in points] == expected
        assert all(point.bytes_per_s > 0 for point in points)
    assert seen == [(i, 40) for i in range(1, 41)]


@given(
    file_bytes=st.integers(1, 1 << 40),
    request_bytes=st.integers(1, 8 * MIB),
    depth=st.sampled_from(DEPTHS),
    is_random=st.booleans(),
)
def test_reads_stay_in_the_file_and_keep_every_thread_busy(
    file_bytes: int, request_bytes: int, depth: int, is_random: bool
) -> None:
    reads = Reads(request_bytes, depth, is_random)
    assert 0 <= reads.n_bytes - request_bytes < 4096
    assert reads.n_requests * reads.n_bytes >= depth * min(reads.n_bytes, MIB)
    for offset in islice(reads.offsets(file_bytes), 20):
        assert offset % 4096 == 0
        assert offset == 0 or offset + reads.n_bytes <= file_bytes


def test_reads_in_order_go_on_and_start_again() -> None:
    offsets = list(islice(Reads(MIB, 1, is_random=False).offsets(3 * MIB + 5), 7))
    places = [offset // MIB for offset in offsets]
    assert all(after == (before + 1) % 3 for before, after in pairwise(places))


@pytest.mark.parametrize("file_bytes", [1, 4095, 100_001])
@pytest.mark.parametrize("is_random", [False, True])
def test_file_smaller_than_one_request_is_read(
    tmp_path: Path, file_bytes: int, is_random: bool
) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(file_bytes))
    [point] = measure_reads(path, [Reads(884_736, 8, is_random)])
    assert (point.request_bytes, point.depth) == (884_736, 8)
    assert point.bytes_per_s > 0


def test_empty_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"")
    with pytest.raises(ModelFileError, match="is empty, expected a model to read"):
        measure_reads(path, [Reads(64 * KIB, 1, is_random=False)])


def test_types_of_weights_are_those_that_make_up_the_model(smollm2_path: Path) -> None:
    assert weight_types(read_model(smollm2_path)) == {"Q4_1": 3, "Q8_0": 8}


@pytest.mark.usefixtures("no_cache")
def test_only_what_is_not_known_is_measured(tiny_llama_path: Path) -> None:
    topology = this_machine()
    assert cached_profile(topology) is None
    seen: list[str] = []

    def profile(types: dict[str, int], path: Path | None = None, force: bool = False) -> list[str]:
        """Return the names of what the profile has, seen the things measured for it."""
        seen.clear()
        found = measured_profile(topology, types, path, force=force, progress=seen.append)
        assert cached_profile(topology) == found
        assert found.memory_bytes_per_s > 0
        plain = [kernel.type for kernel in found.kernels if kernel.backend == CPU]
        return plain + [disk.device for disk in found.disks]

    assert profile({"Q4_0": 2}) == ["Q4_0"]
    assert seen == ["memory", "kernels of Q4_0"]
    assert profile({"Q4_0": 2, "Q8_0": 8}) == ["Q4_0", "Q8_0"]
    assert seen == ["kernels of Q8_0"]
    *kernels, device = profile({"Q8_0": 8}, tiny_llama_path)
    assert kernels == ["Q4_0", "Q8_0"]
    assert seen == ["the disk"]
    assert profile({"Q4_0": 2}, tiny_llama_path) == ["Q4_0", "Q8_0", device]
    assert seen == []
    assert profile({"Q4_0": 2}, force=True) == ["Q4_0"]
    assert seen == ["memory", "kernels of Q4_0"]


@pytest.mark.usefixtures("no_cache")
def test_file_that_can_t_be_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no\.gguf: can't be read: no such file or directory"):
        measured_profile(this_machine(), {}, tmp_path / "no.gguf")


@pytest.mark.usefixtures("no_cache")
def test_death_of_the_measuring_process_is_an_error() -> None:
    topology = this_machine()
    # ggml aborts: weights are never of this type.
    with pytest.raises(EngineDied, match="the measuring process ended by SIGABRT before it was"):
        measured_profile(topology, {"I32": ggml.I32})
    assert cached_profile(topology) is None
