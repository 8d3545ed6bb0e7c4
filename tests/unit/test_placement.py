"""How many cells a context gets: as asked, as trained, as fits."""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from gguf import GGUFValueType
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.config import Settings
from headrace.engine.context_plan import MIN_CTX, cell_bytes, kv_bytes_per_cell, plan_context
from headrace.engine.gguf import Array, Header, SourceFile
from headrace.engine.hardware import CoreKind, Cpu, Topology
from headrace.engine.library import Details, Model, Name
from headrace.engine.messages import ContextCost, Load
from headrace.engine.placement import DEFAULT_CTX, DEFAULT_SLOTS, plan_load
from headrace.engine.plan import ContextPlan

PATH = Path("/models/a.gguf")


def header(**of_architecture: Any) -> Header:
    metadata = {"general.architecture": "llama", "llama.block_count": 4}
    metadata |= {f"llama.{key.replace('__', '.')}": v for key, v in of_architecture.items()}
    source = SourceFile(PATH, 0, 0, 0, b"")
    return Header(PATH, 3, MappingProxyType(metadata), (), 32, 0, (source,))


def int_array(*values: int) -> Array:
    return Array(GGUFValueType.INT32, len(values), struct.pack(f"<{len(values)}i", *values))


def plan(n_ctx: int, n_slots: int = 1, **limits: Any) -> ContextPlan:
    limits = {"n_ctx_train": 0, "bytes_per_cell": 10, "budget_bytes": 1 << 40} | limits
    return plan_context(n_ctx, n_slots, **limits)


def test_a_cell_holds_key_and_value_of_every_layer() -> None:
    shape = header(embedding_length=64, attention__head_count=8, attention__head_count_kv=2)
    assert kv_bytes_per_cell(shape, "f16") == 4 * 2 * (8 + 8) * 2
    assert kv_bytes_per_cell(shape, "q8_0") == 4 * 2 * (8 + 8) * 34 // 32


def test_heads_may_have_their_own_lengths() -> None:
    shape = header(
        embedding_length=64, attention__head_count=8, attention__head_count_kv=2,
        attention__key_length=100, attention__value_length=28,
    )  # fmt: skip
    assert kv_bytes_per_cell(shape, "f16") == 4 * 2 * 128 * 2


def test_without_a_number_of_kv_heads_there_are_as_many_as_heads() -> None:
    assert kv_bytes_per_cell(header(embedding_length=64, attention__head_count=8), "f32") == 2048


def test_layers_without_attention_take_no_cells() -> None:
    shape = header(
        embedding_length=64, attention__head_count=8,
        attention__head_count_kv=int_array(0, 2, 0, 2),
    )  # fmt: skip
    assert kv_bytes_per_cell(shape, "f16") == 2 * 2 * (8 + 8) * 2


def test_a_recurrent_model_takes_no_cells() -> None:
    assert kv_bytes_per_cell(header(embedding_length=64, attention__head_count=0), "f16") == 0


COST = ContextCost(
    kv_type="f16", kv_bytes_per_cell=64000.0, mask_bytes_per_cell=1024.0, fixed_bytes=0
)
LOAD = Load(
    path="", name="", n_ctx=4096, n_slots=1, n_batch=512, n_threads=1, n_threads_batch=1,
    context_cost=COST,
)  # fmt: skip


def test_a_cell_takes_what_llama_cpp_says_of_it_for_any_type_of_cache() -> None:
    shape = header(embedding_length=64, attention__head_count=8)
    of_halves, _ = cell_bytes(shape, LOAD, 4)
    of_bytes, _ = cell_bytes(shape, replace(LOAD, kv_type="q8_0"), 4)
    assert 65024 <= of_halves <= 65024 + 512
    assert of_halves - of_bytes == 64000 - 64000 * 17 // 32


def test_layers_on_a_gpu_have_their_share_of_a_cell_there_and_masks_of_their_own() -> None:
    shape = header(embedding_length=64, attention__head_count=8)
    without, nothing = cell_bytes(shape, LOAD, 4)
    in_ram, in_vram = cell_bytes(shape, LOAD, 1)
    assert nothing == 0
    assert in_vram == 48000 + 1024 and in_ram == without - 48000


@given(
    st.integers(1, 1 << 20), st.integers(1, 64), st.integers(0, 1 << 20), st.integers(0, 1 << 20),
    st.integers(-(1 << 40), 1 << 40), st.booleans(),
)  # fmt: skip
def test_a_context_is_within_what_was_asked_trained_and_there(
    n_ctx: int, n_slots: int, n_ctx_train: int, bytes_per_cell: int, budget: int, widens: bool
) -> None:
    made = plan(
        n_ctx, n_slots, n_ctx_train=n_ctx_train, bytes_per_cell=bytes_per_cell,
        budget_bytes=budget, widens=widens,
    )  # fmt: skip
    assert 1 <= made.n_ctx <= max(n_ctx, 4)
    assert made.n_ctx <= max(n_ctx_train, 4) or n_ctx_train == 0
    assert made.n_ctx <= made.n_cells < max(made.n_ctx * n_slots, made.n_ctx) + 256
    assert made.n_cells % 256 == 0
    assert made.n_bytes == made.n_cells * bytes_per_cell
    assert made.n_bytes <= max(budget, MIN_CTX * bytes_per_cell)
    assert 0 <= made.parking_bytes <= max(budget - made.n_bytes, 0)


def test_with_memory_enough_every_slot_has_its_own_cells() -> None:
    made = plan(4096, 4)
    assert (made.n_ctx, made.n_cells) == (4096, 4 * 4096)


def test_short_memory_makes_slots_share_cells_before_the_context_gets_shorter() -> None:
    shared = plan(4096, 4, budget_bytes=10 * 16_000)
    assert (shared.n_ctx, shared.n_cells) == (4096, 7936)
    short = plan(4096, 4, budget_bytes=10 * 3000)
    assert (short.n_ctx, short.n_cells) == (2816, 2816)


def test_a_context_is_no_longer_than_the_model_was_trained_for() -> None:
    assert plan(1 << 20, n_ctx_train=2048).n_ctx == 2048


def test_rope_factors_that_depend_on_the_cells_get_those_of_one_sequence() -> None:
    assert plan(4096, 4, widens=False).n_cells == 4096


def topology(*kinds: CoreKind) -> Topology:
    cpus = tuple(Cpu(i, i, (i,), kind) for i, kind in enumerate(kinds))
    return Topology(cpus, None)


def model() -> Model:
    return Model(
        Name.parse("a"), header(), 0, "", datetime.now(UTC), Details("", (), "", ""), "", ()
    )


FAST, SLOW = CoreKind.PERFORMANCE, CoreKind.EFFICIENCY


def test_a_model_is_loaded_as_the_settings_say() -> None:
    settings = Settings(context=1234, parallel=3, threads=5, kv_cache_type="q8_0")
    load = plan_load(model(), settings, topology(FAST, FAST))
    assert (load.path, load.n_ctx, load.n_slots, load.kv_type) == (str(PATH), 1234, 3, "q8_0")
    assert (load.n_threads, load.n_threads_batch, load.least_ctx) == (5, 5, 0)


def test_what_the_settings_leave_open_follows_the_machine() -> None:
    load = plan_load(model(), Settings(), topology(FAST, FAST, FAST))
    assert (load.n_slots, load.n_threads) == (DEFAULT_SLOTS, 3)
    assert (load.n_ctx, load.least_ctx) == (DEFAULT_CTX, 1536)


@pytest.mark.parametrize(
    ("kinds", "decode_cpus", "io_cpus"),
    [((FAST, FAST), (), ()), ((SLOW, FAST, FAST, SLOW), (1, 2), (0, 3))],
)
def test_threads_are_pinned_only_where_some_cores_are_slow(
    kinds: tuple[CoreKind, ...], decode_cpus: tuple[int, ...], io_cpus: tuple[int, ...]
) -> None:
    load = plan_load(model(), Settings(), topology(*kinds))
    assert (load.decode_cpus, load.io_cpus) == (decode_cpus, io_cpus)
