"""Forecasts: the arithmetic of bytes and speeds, and that more of anything is never slower."""

from __future__ import annotations

from dataclasses import replace

import header_only
import msgspec
import numpy as np
import pytest
from golden_plans import GIB, load, machine, predict
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import DoesNotFit, EngineError
from headrace.engine.forecast import (
    Correction,
    at_disk_speed,
    calibrate,
    calibrate_load,
    calibrate_prefill,
    forecast,
)
from headrace.engine.gguf import Header, read_model
from headrace.engine.messages import Forecast
from headrace.engine.pace import Answer, Prompt
from headrace.engine.pass_time import N_CONTEXT, CostModel
from headrace.engine.plan import WeightsPlan
from headrace.engine.profile import CPU_REPACK, KernelSpeed, Profile
from headrace.engine.routing import ExpertUsage
from headrace.engine.tensors import TensorTable, read_tensors

Read = tuple[Header, TensorTable]
NAMES = tuple(model.name for model in header_only.MODELS)
DENSE, MIXTRAL, QWEN3, GPT_OSS, DEEPSEEK = NAMES
GB = 1e9


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    folder = tmp_path_factory.mktemp("headers")
    headers = [read_model(header_only.build(model, folder)) for model in header_only.MODELS]
    return dict(zip(NAMES, ((h, read_tensors(h)) for h in headers), strict=True))


def even_profile(weights_per_s: float, memory_per_s: float) -> Profile:
    """Return a profile with kernels that all use weights at that speed."""
    kernels = tuple(
        KernelSpeed(kernel.type, weights_per_s, 1e12, 1e12) for kernel in machine(GB)[0].kernels
    )
    return msgspec.structs.replace(machine(GB)[0], kernels=kernels, memory_bytes_per_s=memory_per_s)


def used_bytes(table: TensorTable) -> float:
    """Return the weights that one token is multiplied with."""
    trunk = sum(t.n_bytes for t in table.trunk if t.name != "token_embd.weight")
    experts = sum(p.n_bytes / b.n_experts * table.n_used for b in table.experts for p in b.parts)
    return trunk + table.dense_bytes + experts


@pytest.mark.parametrize("name", [DENSE, MIXTRAL, QWEN3, GPT_OSS])
def test_a_resident_model_takes_the_time_that_its_weights_take(
    name: str, models: dict[str, Read]
) -> None:
    header, table = models[name]
    plan, _ = predict(header, table, 80 * GIB, GB)
    made = forecast(even_profile(10 * GB, 50 * GB), machine(GB)[1], table, plan)
    assert (plan.mode, made.read_bytes_per_token, made.expert_hit_rate) == (
        "full-resident",
        0,
        None,
    )
    # Floats without a kernel of their own come as fast as memory does.
    assert made.decode_tokens_per_s == pytest.approx(10 * GB / used_bytes(table), rel=0.05)


def test_a_slow_disk_alone_sets_the_pace_of_a_streamed_dense_model(
    models: dict[str, Read],
) -> None:
    plan, made = predict(*models[DENSE], 16 * GIB, 2 * GB)
    streamed = sum(tensor.n_bytes for tensor in plan.streamed)
    assert made.read_bytes_per_token == streamed > 20 * GB
    assert made.decode_tokens_per_s == pytest.approx(2 * GB / streamed)
    assert made.limit == "disk"


def test_a_disk_that_is_fast_enough_is_hidden(models: dict[str, Read]) -> None:
    resident = predict(*models[DENSE], 80 * GIB, GB)[1]
    streamed = predict(*models[DENSE], 40 * GIB, 100 * GB)[1]
    assert streamed.read_bytes_per_token > 0
    assert streamed.decode_tokens_per_s == pytest.approx(resident.decode_tokens_per_s)


def test_experts_that_are_missed_are_read(models: dict[str, Read]) -> None:
    _, table = models[QWEN3]
    _, made = predict(*models[QWEN3], 8 * GIB, GB)
    one_token = sum(p.n_bytes / b.n_experts * table.n_used for b in table.experts for p in b.parts)
    assert made.expert_hit_rate is not None and 0.5 < made.expert_hit_rate < 0.9
    assert made.read_bytes_per_token == pytest.approx(
        (1 - made.expert_hit_rate) * one_token, rel=0.02
    )
    assert (made.hit_rate_source, made.limit) == ("prior", "disk")


def test_a_router_that_prefers_few_experts_needs_less_of_the_disk(models: dict[str, Read]) -> None:
    header, table = models[QWEN3]
    plan, prior = predict(header, table, 8 * GIB, GB)
    counts = np.r_[np.full(16, 9000), np.full(112, 50)]
    usage = ExpertUsage((counts,) * len(table.experts))
    learnt = forecast(*machine(GB), table, plan, usage=usage)
    assert learnt.hit_rate_source == "learnt"
    assert learnt.decode_tokens_per_s > 1.5 * prior.decode_tokens_per_s


@pytest.mark.parametrize(("kernel", "limit"), [(9 * GB, "memory bandwidth"), (2 * GB, "compute")])
def test_kernels_near_memorys_speed_wait_for_memory(
    kernel: float, limit: str, models: dict[str, Read]
) -> None:
    _, table = models[DENSE]
    plan, _ = predict(*models[DENSE], 80 * GIB, GB)
    assert forecast(even_profile(kernel, 10 * GB), machine(GB)[1], table, plan).limit == limit


def test_a_prompt_streams_the_weights_once_for_each_batch(models: dict[str, Read]) -> None:
    plan, made = predict(*models[DENSE], 16 * GIB, 0.05 * GB)
    streamed = sum(tensor.n_bytes for tensor in plan.streamed)
    assert made.ttft_s_per_1000_tokens == pytest.approx(1000 / 512 * streamed / (0.05 * GB))


def test_types_that_were_not_measured_count_as_the_slowest_and_are_named(
    models: dict[str, Read],
) -> None:
    profile, disk = machine(GB)
    _, table = models[GPT_OSS]
    plan, known = predict(*models[GPT_OSS], 80 * GIB, GB)
    kernels = tuple(kernel for kernel in profile.kernels if kernel.type != "MXFP4")
    made = forecast(msgspec.structs.replace(profile, kernels=kernels), disk, table, plan)
    assert (known.unmeasured_types, made.unmeasured_types) == ((), ("MXFP4",))
    assert made.decode_tokens_per_s < known.decode_tokens_per_s


def test_a_profile_without_kernels_is_refused(models: dict[str, Read]) -> None:
    profile, disk = machine(GB)
    plan, _ = predict(*models[DENSE], 80 * GIB, GB)
    with pytest.raises(EngineError, match="no kernel speeds"):
        forecast(msgspec.structs.replace(profile, kernels=()), disk, models[DENSE][1], plan)


def test_more_memory_is_told_about_until_all_is_resident(models: dict[str, Read]) -> None:
    _, made = predict(*models[DENSE], 30 * GIB, GB)
    assert [more.budget_bytes for more in made.more_memory] == [
        30 * GIB * 5 // 4, 30 * GIB * 3 // 2, 60 * GIB
    ]  # fmt: skip
    assert [more.mode for more in made.more_memory][0::2] == [
        "dense-ffn-streaming", "full-resident"
    ]  # fmt: skip
    speeds = [made.decode_tokens_per_s, *(m.decode_tokens_per_s for m in made.more_memory)]
    assert speeds == sorted(speeds)


def planned(read: Read, budget_bytes: int, disk: float) -> tuple[WeightsPlan, Forecast] | None:
    try:
        return predict(*read, budget_bytes, disk)
    except DoesNotFit:
        return None


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    budgets=st.lists(st.integers(2 << 10, 440 << 10), min_size=2, max_size=2),
    disk=st.floats(0.2, 14),
)
def test_more_memory_is_never_slower_and_no_plan_exceeds_its_budget(
    name: str, budgets: list[int], disk: float, models: dict[str, Read]
) -> None:
    low, high = (planned(models[name], mib << 20, disk * GB) for mib in sorted(budgets))
    if low is None:
        return  # too little to run at all
    assert high is not None
    for (plan, _), mib in zip((low, high), sorted(budgets), strict=True):
        assert plan.n_bytes <= mib << 20
    slow, fast = low[1], high[1]
    assert fast.decode_tokens_per_s >= slow.decode_tokens_per_s * (1 - 1e-6)
    assert fast.ttft_s_per_1000_tokens <= slow.ttft_s_per_1000_tokens * (1 + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_is_said_to_need_is_enough(name: str, models: dict[str, Read]) -> None:
    with pytest.raises(DoesNotFit) as refused:
        predict(*models[name], GIB // 2, GB)
    plan, _ = predict(*models[name], refused.value.needed_bytes, GB)
    assert plan.n_bytes == refused.value.needed_bytes


def test_a_model_is_resident_as_soon_as_it_fits_with_one_sequence(
    models: dict[str, Read],
) -> None:
    resident, _ = predict(*models[DENSE], 80 * GIB, GB)
    assert predict(*models[DENSE], resident.n_bytes, GB)[0].mode == "full-resident"
    assert predict(*models[DENSE], resident.n_bytes - 1, GB)[0].mode == "dense-ffn-streaming"


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES), budget_gib=st.integers(24, 440),
    disks=st.lists(st.floats(0.05, 30), min_size=2, max_size=2),
)  # fmt: skip
def test_a_faster_disk_is_never_slower(
    name: str, budget_gib: int, disks: list[float], models: dict[str, Read]
) -> None:
    slow, fast = (predict(*models[name], budget_gib * GIB, disk * GB)[1] for disk in sorted(disks))
    assert fast.decode_tokens_per_s >= slow.decode_tokens_per_s
    assert fast.ttft_s_per_1000_tokens <= slow.ttft_s_per_1000_tokens
    assert fast.load_s <= slow.load_s


def test_what_was_measured_corrects_the_next_forecasts(models: dict[str, Read]) -> None:
    header, table = models[QWEN3]
    plan, made = predict(header, table, 8 * GIB, GB)
    cost = CostModel.of(*machine(GB), table, None)
    measured, correction = made.decode_tokens_per_s / 2, 1.0
    errors = []
    for _ in range(4):
        answer = Answer(measured, made.read_bytes_per_token, N_CONTEXT)
        correction = calibrate(cost, plan, correction, answer)
        made = forecast(*machine(GB), table, plan, correction=Correction(correction))
        errors.append(made.decode_tokens_per_s / measured - 1)
    assert 0 < errors[0] < 0.25  # most of the way at once, and no further
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.01


def test_a_correction_stays_within_bounds(models: dict[str, Read]) -> None:
    header, table = models[QWEN3]
    plan, made = predict(header, table, 8 * GIB, GB)
    cost, n_bytes = CostModel.of(*machine(GB), table, None), made.read_bytes_per_token
    right = Answer(made.decode_tokens_per_s, n_bytes, N_CONTEXT)
    assert calibrate(cost, plan, 1, right) == pytest.approx(1, rel=1e-4)
    assert calibrate(cost, plan, 1, Answer(1e-6, n_bytes, N_CONTEXT)) == 0.25
    assert calibrate(cost, plan, 1, Answer(1e6, n_bytes, N_CONTEXT)) == 4


def test_what_a_cold_cache_costs_is_no_fault_of_the_forecast(models: dict[str, Read]) -> None:
    header, table = models[QWEN3]
    plan, made = predict(header, table, 8 * GIB, GB)
    cost, n_bytes = CostModel.of(*machine(GB), table, None), 3 * made.read_bytes_per_token
    cold = Answer(1 / cost.decode(plan, n_bytes).seconds, n_bytes, N_CONTEXT)
    assert cold.tokens_per_s < made.decode_tokens_per_s / 2
    assert calibrate(cost, plan, 1, cold) == pytest.approx(1)
    assert calibrate(cost, plan, 0.5, cold) > 0.8


def test_an_answer_behind_a_long_prompt_teaches_nothing_of_its_length(
    models: dict[str, Read],
) -> None:
    header, table = models[QWEN3]
    plan, made = predict(header, table, 64 * GIB, GB)
    cost = CostModel.of(*machine(GB), table, None)
    behind = Answer(1 / cost.decode(plan, n_context=30_000).seconds, 0, 30_000)
    assert behind.tokens_per_s < 0.9 * made.decode_tokens_per_s
    assert calibrate(cost, plan, 1, behind) == pytest.approx(1)


@pytest.mark.parametrize("n_tokens", [256, 512, 900, 5000])
def test_prompts_of_any_length_teach_the_same(models: dict[str, Read], n_tokens: int) -> None:
    header, table = models[QWEN3]
    plan, before = predict(header, table, 8 * GIB, GB)
    cost, correction = CostModel.of(*machine(GB), table, None), 1.0
    assert calibrate_prefill(cost, plan, correction, []) == correction
    prompt = Prompt(n_tokens, 1.25 * cost.prompt_s(plan, n_tokens))
    for _ in range(4):
        correction = calibrate_prefill(cost, plan, correction, [prompt])
    assert correction == pytest.approx(1 / 1.25, rel=0.01)
    after = forecast(*machine(GB), table, plan, correction=Correction(prefill=correction))
    ratio = after.ttft_s_per_1000_tokens / before.ttft_s_per_1000_tokens
    assert ratio == pytest.approx(1.25, rel=0.01)


def test_loads_from_the_page_cache_teach_what_loads_from_the_disk_do(
    models: dict[str, Read],
) -> None:
    header, table = models[DENSE]
    for budget_gib in (16, 80):  # streamed, and resident
        plan, before = predict(header, table, budget_gib * GIB, GB)
        cost = CostModel.of(*machine(GB), table, None)
        time = cost.load(plan)
        assert before.load_s == pytest.approx(time.read_s + time.other_s)
        for n_read in (0.0, time.read_bytes / 3, time.read_bytes):
            correction, seconds = 1.0, time.seconds(1 / 1.5, n_read)
            for _ in range(4):
                correction = calibrate_load(cost, plan, correction, seconds, n_read)
            assert correction == pytest.approx(1 / 1.5, rel=0.01)
        made = forecast(*machine(GB), table, plan, correction=Correction(load=1 / 1.5))
        assert made.load_s == pytest.approx(time.read_s + 1.5 * time.other_s)
        assert calibrate_load(cost, plan, 1, 0.0, 0.0) == 4


def test_repacked_weights_are_used_where_they_stay_and_loaded_slower(
    models: dict[str, Read],
) -> None:
    header, table = models[DENSE]
    profile = even_profile(10 * GB, 50 * GB)
    repacked = tuple(
        KernelSpeed(k.type, 20 * GB, 1e12, 1e12, CPU_REPACK, load_bytes_per_s=GB)
        for k in profile.kernels
    )
    faster = msgspec.structs.replace(profile, kernels=profile.kernels + repacked)
    for budget_gib, gain in ((80, 2.0), (16, 1.0)):  # resident, and bound by its disk
        plan, _ = predict(header, table, budget_gib * GIB, GB)
        before, after = (forecast(p, machine(GB)[1], table, plan) for p in (profile, faster))
        ratio = after.decode_tokens_per_s / before.decode_tokens_per_s
        assert ratio == pytest.approx(gain, rel=0.05)
    plan, _ = predict(header, table, 80 * GIB, GB)
    before, after = (forecast(p, machine(GB)[1], table, plan) for p in (profile, faster))
    assert after.load_s - before.load_s == pytest.approx(plan.resident_bytes / GB, rel=0.02)


def test_a_load_gets_the_disks_speed_unless_it_has_one(models: dict[str, Read]) -> None:
    unknown = load(models[DENSE][0], 0)
    _, disk = machine(3 * GB)
    assert at_disk_speed(unknown, disk).disk_bytes_per_s == pytest.approx(
        disk.bytes_per_s(1 << 20, 4, is_random=False)
    )
    known = load(models[DENSE][0], 7 * GB)
    assert at_disk_speed(known, disk) == known


def test_a_smaller_physical_batch_goes_through_the_weights_more_often(
    models: dict[str, Read],
) -> None:
    _, table = models[DENSE]
    plan, made = predict(*models[DENSE], 16 * GIB, 0.05 * GB)
    small = forecast(*machine(0.05 * GB), table, replace(plan, n_ubatch=128))
    assert small.ttft_s_per_1000_tokens == pytest.approx(4 * made.ttft_s_per_1000_tokens)
