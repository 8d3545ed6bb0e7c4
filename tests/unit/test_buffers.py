"""What a process takes beside weights and cells: what llama.cpp says, and what kernels take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import header_only
import pytest
from msgspec.structs import replace

from headrace.engine import gguf
from headrace.engine.buffers import estimated_bytes, process_buffers
from headrace.engine.messages import ContextCost, Load
from headrace.engine.tensors import TensorTable, read_tensors

MIB = 1 << 20
Read = tuple[gguf.Header, TensorTable]
COST = ContextCost(
    kv_type="f16", kv_bytes_per_cell=65536.0, mask_bytes_per_cell=1040.0, fixed_bytes=100 * MIB
)


def load(**changes: Any) -> Load:
    asked = Load(
        path="", name="", n_ctx=4096, n_slots=1, n_batch=512, n_threads=1, n_threads_batch=1,
        context_cost=COST,
    )  # fmt: skip
    return replace(asked, **changes)


def ram_bytes(header: gguf.Header, table: TensorTable, asked: Load) -> int:
    return process_buffers(header, table, asked).ram_bytes


@pytest.fixture(params=[header_only.LLAMA_70B, header_only.QWEN3_30B], ids=["dense", "moe"])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    header = gguf.read_model(header_only.build(request.param, tmp_path))
    return header, read_tensors(header)


def test_what_llama_cpp_says_is_counted_as_it_is(read: Read) -> None:
    more = replace(COST, fixed_bytes=COST.fixed_bytes + 12345)
    with_more = ram_bytes(*read, load(context_cost=more))
    assert with_more - ram_bytes(*read, load()) == 12345


def test_kernels_take_the_widest_activations_of_a_batch_in_their_type(read: Read) -> None:
    grown = ram_bytes(*read, load(n_batch=1024)) - ram_bytes(*read, load())
    # Of experts 8 rows of 768 for each token, and which of 128 experts have it.
    widest, rows = (8 * 768, 128 * 8 * 8) if read[1].experts else (28672, 0)
    assert grown == pytest.approx(512 * (widest * 292 / 256 + rows), abs=1)


def test_each_thread_takes_memory_of_its_own(read: Read) -> None:
    with_more = ram_bytes(*read, load(n_threads_batch=9))
    assert with_more - ram_bytes(*read, load()) >= 8 * MIB // 2


def test_a_vocabulary_takes_memory_in_tables_and_in_every_slots_sampler(tmp_path: Path) -> None:
    model = header_only.QWEN3_30B
    small = gguf.read_model(header_only.build(model, tmp_path))
    large = gguf.read_model(header_only.build(model, tmp_path, n_tokens=150_000))
    table = read_tensors(large)
    for n_slots, least, most in ((1, 20, 40), (4, 25, 50)):
        asked = load(n_slots=n_slots)
        grown = ram_bytes(large, table, asked) - ram_bytes(small, table, asked)
        assert least * MIB < grown < most * MIB


def test_without_a_word_of_llama_cpp_it_is_estimated(read: Read) -> None:
    header, table = read
    estimated = ram_bytes(header, table, load(context_cost=None))
    assert estimated >= estimated_bytes(header, table, 512, 1) > 24 * MIB
