"""Layers on a GPU, weights beside them streamed; where this llama.cpp and machine have a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import streamed
import streaming_models

from headrace.engine import ggml, gguf, llama
from headrace.engine.plan import WeightsPlan
from headrace.engine.streaming import WeightStream
from headrace.engine.tensors import is_beside_experts, name_patterns, read_tensors
from headrace.engine.tiers import fewest_layers

Built = Callable[[str], Path]
# Fewer tokens than a GPU would take weights from memory for: the CPU computes what is there.
N_UBATCH = 16


@pytest.fixture(scope="module")
def gpu(backend: None) -> ggml.Backend:
    gpus = [found for found in ggml.list_backends() if found.is_gpu]
    if not gpus:
        pytest.skip("needs a GPU, and a llama.cpp that was built for it")
    return gpus[0]


def plan(path: Path, gpu: ggml.Backend, n_gpu_layers: int) -> WeightsPlan:
    """Return a plan that streams all that can be, and has the rest of so many layers on gpu."""
    table = read_tensors(gguf.read_model(path))
    made = streamed.plan(path, 0.3 if table.experts else 0)
    on_gpu = [t for t in table.trunk if fewest_layers(t, table) <= n_gpu_layers]
    return replace(
        made, gpu=gpu.name, n_gpu_layers=n_gpu_layers,
        in_vram=tuple(t for t in on_gpu if not is_beside_experts(t)),
        in_ram=tuple(t for t in on_gpu if is_beside_experts(t)),
        n_ubatch=min(N_UBATCH, made.n_ubatch),
    )  # fmt: skip


def logits(path: Path, made: WeightsPlan, gpu: ggml.Backend, is_streamed: bool) -> streamed.Logits:
    """Return the logits with what the plan streams streamed, or in memory as it is."""
    stream = None
    tensors = list(made.in_ram)
    if is_streamed:
        stream = WeightStream(gguf.read_model(path), made, llama.streaming_functions())
    else:
        tensors += made.streamed
    in_memory = streamed.plain_buffer_type()
    overrides = [(pattern, in_memory) for pattern in name_patterns(tensors)]
    model = llama.Model(
        path, repacks=False, stream=stream, overrides=overrides, gpu=gpu.device,
        n_gpu_layers=made.n_gpu_layers,
    )  # fmt: skip
    try:
        return streamed.run(model, made.n_ubatch, n_decode=16)
    finally:
        model.close()


@pytest.mark.parametrize("layers", ["all", "half"])
@pytest.mark.parametrize("name", streaming_models.SHAPES)
def test_logits_equal_those_with_the_same_weights_in_memory_bit_for_bit(
    name: str, layers: str, gpu: ggml.Backend, built: Built
) -> None:
    path = built(name)
    n_blocks = streaming_models.SHAPES[name].n_layer
    made = plan(path, gpu, n_blocks + 1 if layers == "all" else n_blocks // 2)
    free = gpu.memory_bytes()[0]
    found = logits(path, made, gpu, is_streamed=True)
    assert np.isfinite(found).all()
    assert np.array_equal(found, logits(path, made, gpu, is_streamed=False))
    assert gpu.memory_bytes()[0] >= free - (256 << 20)  # what the driver keeps for itself


@pytest.mark.parametrize("name", ["dense", "qwen3moe"])
def test_weights_go_to_the_gpu_as_planned(name: str, gpu: ggml.Backend, built: Built) -> None:
    path = built(name)
    shape = streaming_models.SHAPES[name]
    model = llama.Model(path)
    on_cpu = streamed.run(model, N_UBATCH, n_decode=4)
    model.close()
    free = gpu.memory_bytes()[0]
    model = llama.Model(path, gpu=gpu.device, n_gpu_layers=shape.n_layer + 1)
    assert gpu.memory_bytes()[0] < free
    on_gpu = streamed.run(model, N_UBATCH, n_decode=4)
    model.close()
    # Other kernels round in other places: near, and not the same.
    assert not np.array_equal(on_cpu, on_gpu)
    assert np.argmax(on_cpu[0]) == np.argmax(on_gpu[0])
