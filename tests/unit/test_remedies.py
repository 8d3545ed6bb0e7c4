"""What would make a model fit: flags that do, else all that bring the need down."""

from __future__ import annotations

from pathlib import Path

import header_only
import msgspec
import pytest

from headrace.engine.context_plan import kv_bytes_per_cell
from headrace.engine.errors import DoesNotFit
from headrace.engine.gguf import read_model
from headrace.engine.messages import Load
from headrace.engine.placement import plan_model, plan_model_context
from headrace.engine.remedies import find_remedies
from headrace.engine.tensors import read_tensors


def asked(**changes: object) -> Load:
    plain = Load(
        path="", name="", n_ctx=4096, n_slots=4, n_batch=512, n_threads=1, n_threads_batch=1
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def needed_bytes(of: Load) -> int:
    """Return a made-up need: 1000 for weights, a byte for a token, half of it in q8_0."""
    return 1000 + of.n_ctx // (2 if of.kv_type == "q8_0" else 1) + 10 * of.n_slots


def found(budget_bytes: int, **changes: object) -> list[tuple[str, int]]:
    remedies = find_remedies(asked(**changes), 8192, budget_bytes, needed_bytes)
    return [(remedy.flags, remedy.needed_bytes) for remedy in remedies]


def test_each_flag_that_makes_it_fit_is_named_alone_with_the_longest_context() -> None:
    assert found(3100) == [("--context 2048", 3088), ("--kv-cache-type q8_0", 3088)]
    assert found(5110) == [
        ("--context 2048", 3088), ("--kv-cache-type q8_0", 3088), ("--parallel 1", 5106)
    ]  # fmt: skip


def test_flags_are_joined_where_none_is_enough_alone() -> None:
    assert found(1300) == [("--kv-cache-type q8_0 --context 512", 1296)]


def test_where_nothing_is_enough_all_that_need_less_are_named() -> None:
    assert found(1000) == [
        ("--context 512", 1552), ("--kv-cache-type q8_0", 3088), ("--parallel 1", 5106),
        ("--kv-cache-type q8_0 --context 512", 1296),
    ]  # fmt: skip


def test_what_is_asked_for_already_is_not_proposed() -> None:
    flags = [flags for flags, _ in found(1000, kv_type="q8_0", n_slots=1, n_ctx=512)]
    assert flags == []


def test_the_error_names_bytes_and_the_flags_that_help(tmp_path: Path) -> None:
    header = read_model(header_only.build(header_only.QWEN3_30B, tmp_path))
    table, wide = read_tensors(header), asked(n_ctx=256, n_slots=128)
    with pytest.raises(DoesNotFit, match=r"still too much, with .*--parallel 1 ") as refused:
        plan_model(header, table, wide, 1 << 20)
    assert refused.value.helpful_flags == ()
    needed = refused.value.needed_bytes
    with pytest.raises(DoesNotFit, match=r"use what needs less: .*--parallel 1 ") as close:
        plan_model(header, table, wide, needed - 1)
    assert "--parallel 1" in close.value.helpful_flags
    fewer = msgspec.structs.replace(wide, n_slots=1)
    assert plan_model(header, table, fewer, needed - 1).n_bytes < needed


def test_a_context_that_nobody_asked_for_is_the_longest_that_fits(tmp_path: Path) -> None:
    header = read_model(header_only.build(header_only.LLAMA_70B, tmp_path))
    table, asked_for = read_tensors(header), asked(n_slots=1)
    load = msgspec.structs.replace(asked_for, least_ctx=1536)
    with pytest.raises(DoesNotFit) as refused:
        plan_model(header, table, asked_for, 1 << 20)
    needed_bytes = refused.value.needed_bytes
    cell_bytes = kv_bytes_per_cell(header, "f16")
    for n_missing, n_ctx in ((0, 4096), (1, 3840), (256, 3840), (257, 3584), (2560, 1536)):
        budget_bytes = needed_bytes - n_missing * cell_bytes
        plan = plan_model(header, table, load, budget_bytes)
        assert plan.kv_bytes == n_ctx * cell_bytes
        assert plan.n_ubatch == 512
        assert plan_model_context(header, load, plan, budget_bytes, 4096).n_ctx >= n_ctx
    with pytest.raises(DoesNotFit):
        plan_model(header, table, asked_for, needed_bytes - 1)


def test_batches_are_smaller_where_the_shortest_context_is_not_enough(tmp_path: Path) -> None:
    header = read_model(header_only.build(header_only.LLAMA_70B, tmp_path))
    table, short = read_tensors(header), asked(n_ctx=1536, n_slots=1)
    with pytest.raises(DoesNotFit) as refused:
        plan_model(header, table, short, 1 << 20)
    budget_bytes = refused.value.needed_bytes - 1
    plan = plan_model(header, table, asked(n_slots=1, least_ctx=1536), budget_bytes)
    assert plan.n_ubatch == 128
    assert plan.n_bytes <= budget_bytes
