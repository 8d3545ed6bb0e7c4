"""Plans of where weights are: within the budget, spread evenly, refused with the numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import streaming_models
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import gguf, placement
from headrace.engine.errors import DoesNotFit, ModelUnusable
from headrace.engine.messages import Mode
from headrace.engine.plan import WeightsPlan
from headrace.engine.tensors import TensorTable, read_tensors

MIB = 1 << 20
Read = tuple[gguf.Header, TensorTable]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name in ("dense", "mixed_dense", "qwen3moe", "mixed_moe", "biased_moe"):
        shape = streaming_models.SHAPES[name]
        header = gguf.read_model(streaming_models.build(shape, folder, name))
        found[name] = header, read_tensors(header)
    return found


def plan(read: Read, budget_bytes: int, mode: Mode = "auto") -> WeightsPlan:
    return placement.plan_weights(
        *read, mode=mode, budget_bytes=budget_bytes, kv_bytes=MIB, n_batch=32, n_slots=1
    )


def test_roles_cover_every_tensor_once(models: dict[str, Read]) -> None:
    for header, table in models.values():
        names = [tensor.name for tensor in table.trunk]
        names += [item.tensor.name for item in table.dense]
        names += [part.name for block in table.experts for part in block.parts]
        assert sorted(names) == sorted(tensor.name for tensor in header.tensors)


def test_experts_are_streamed_and_their_biases_and_routers_stay(models: dict[str, Read]) -> None:
    _, table = models["biased_moe"]
    trunk = {tensor.name for tensor in table.trunk}
    for block in table.experts:
        prefix = f"blk.{block.block}.ffn"
        assert [part.name for part in block.parts] == [
            f"{prefix}_{kind}_exps.weight" for kind in ("gate", "up", "down")
        ]
        assert {f"{prefix}_gate_inp.weight", f"{prefix}_up_exps.bias"} <= trunk
    assert table.n_used == 4


def test_a_model_that_fits_is_resident(models: dict[str, Read]) -> None:
    for read in models.values():
        made = plan(read, 1 << 40)
        assert made.mode == "full-resident" and not made.streamed


@settings(max_examples=60, deadline=None)
@given(
    budget_kib=st.integers(1 << 10, 64 << 10),
    name=st.sampled_from(["mixed_dense", "mixed_moe"]),
    mode=st.sampled_from(["auto", "full-resident"]),
)
def test_a_plan_never_takes_more_than_the_budget(
    budget_kib: int, name: str, mode: Mode, models: dict[str, Read]
) -> None:
    try:
        made = plan(models[name], budget_kib << 10, mode)
    except DoesNotFit:
        return  # too little for any plan
    assert made.n_bytes <= budget_kib << 10
    _, table = models[name]
    for blocks, n_records in zip(made.expert_blocks, made.pool_records, strict=True):
        assert len(blocks) * table.n_used <= n_records <= len(blocks) * blocks[0].n_experts
        assert min(blocks[0].n_experts, made.n_ubatch * table.n_used) <= n_records


def least_bytes(read: Read) -> int:
    """Return what the smallest plan of a dense model takes."""
    table = read[1]
    huge = plan(read, 1 << 40, "dense-ffn-streaming")
    return huge.n_bytes - (huge.resident_bytes - table.trunk_bytes)


def test_with_more_memory_less_is_streamed(models: dict[str, Read]) -> None:
    read = models["mixed_dense"]
    least, dense = least_bytes(read), read[1].dense_bytes
    streamed = []
    for share in range(101):
        made = plan(read, least + share * dense // 100, "dense-ffn-streaming")
        streamed.append(sum(tensor.n_bytes for tensor in made.streamed))
    assert streamed[0] == dense and streamed[-1] <= dense // 10
    assert all(b <= a for a, b in pairwise(streamed))


def test_pins_are_spread_evenly_over_the_order_of_use(models: dict[str, Read]) -> None:
    read = models["dense"]
    table = read[1]
    made = plan(read, least_bytes(read) + table.dense_bytes // 2, "dense-ffn-streaming")
    streamed = {tensor.name for tensor in made.streamed}
    pinned = [item.tensor.name not in streamed for item in table.dense]
    third = len(pinned) // 3
    counts = [sum(pinned[i * third : (i + 1) * third]) for i in range(3)]
    assert sum(pinned) > 4 and max(counts) - min(counts) <= 2, counts


@pytest.mark.parametrize(
    ("name", "mode", "reason"),
    [
        ("mixed_dense", "expert-streaming", "has no experts"),
        ("qwen3moe", "dense-ffn-streaming", "has no feed-forward weights to stream"),
    ],
)
def test_a_mode_that_does_not_fit_the_model_is_refused(
    name: str, mode: Mode, reason: str, models: dict[str, Read]
) -> None:
    with pytest.raises(ModelUnusable, match=reason):
        plan(models[name], 1 << 40, mode)
