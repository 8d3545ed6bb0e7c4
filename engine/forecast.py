"""How fast a planned model will be, what will limit it, and what more memory would change.

In: what was measured of the machine, a model's tensors, a plan, what was learnt of its experts.
Out: a Forecast. Pure; knows no file, and stores nothing of what it learns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headrace.engine.gguf import Header
from headrace.engine.messages import Forecast, Load, MoreMemory
from headrace.engine.pace import Answer
from headrace.engine.pass_time import FLOATS, N_PROMPT, PIECE_BYTES, CostModel, n_prefill
from headrace.engine.placement import plan_model
from headrace.engine.plan import WeightsPlan
from headrace.engine.profile import DiskProfile, Profile
from headrace.engine.routing import ExpertUsage
from headrace.engine.tensors import TensorTable

# More memory that is worth telling about, in percent.
MORE_PERCENT = (25, 50, 100)

# A correction takes this part of the error, measured as a ratio, and stays within bounds: what is
# further off is another fault, such as a busy machine.
_LEARNING = 0.75
_LEAST_CORRECTION, _MOST_CORRECTION = 0.25, 4.0


def forecast(
    profile: Profile, disk: DiskProfile, table: TensorTable, plan: WeightsPlan, *,
    usage: ExpertUsage | None = None, correction: float = 1.0,
    larger: Sequence[tuple[int, WeightsPlan]] = (),
) -> Forecast:  # fmt: skip
    """Return what to expect of a model that is loaded from disk as plan says.

    larger are budgets in bytes with their plans; correction is what calibrate has learnt.

    Raises:
        EngineError: the profile has no kernels.
    """
    return _forecast(CostModel.of(profile, disk, table, usage), plan, correction, larger)


def _forecast(
    model: CostModel, plan: WeightsPlan, correction: float,
    larger: Sequence[tuple[int, WeightsPlan]],
) -> Forecast:  # fmt: skip
    decode, prefill = model.decode(plan), model.prefill(plan)
    types = sorted({tensor.type_name for tensor, _ in model.matrices()} - FLOATS)
    is_routed = bool(plan.expert_blocks)
    return Forecast(
        decode_tokens_per_s=correction / decode.seconds,
        ttft_s_per_1000_tokens=N_PROMPT / n_prefill(plan) * prefill.seconds,
        load_s=model.load_s(plan),
        limit=model.limit(plan, decode),
        read_bytes_per_token=decode.read_bytes,
        expert_hit_rate=model.hit_rate(plan) if is_routed else None,
        hit_rate_source=("learnt" if model.is_learnt else "prior") if is_routed else None,
        correction=correction,
        unmeasured_types=tuple(name for name in types if not model.is_measured(name, plan)),
        more_memory=tuple(_more_memory(model, *other, correction) for other in larger),
    )


def at_disk_speed(load: Load, disk: DiskProfile) -> Load:
    """Return load with the speed of disk as streaming reads it, unless load has one already."""
    if load.disk_bytes_per_s:
        return load
    depth = disk.reads_in_flight(PIECE_BYTES)
    speed = disk.bytes_per_s(PIECE_BYTES, depth, is_random=False)
    return msgspec.structs.replace(load, disk_bytes_per_s=speed)


def forecast_load(
    header: Header, load: Load, plan: WeightsPlan, budget_bytes: int, cost: CostModel, *,
    correction: float,
) -> Forecast:  # fmt: skip
    """Return what to expect of a model that is loaded by plan, and of one with larger budgets."""
    budgets = [budget_bytes * (100 + percent) // 100 for percent in MORE_PERCENT]
    larger = [(budget, plan_model(header, cost.table, load, budget, cost)) for budget in budgets]
    return _forecast(cost, plan, correction, larger)


def calibrate(cost: CostModel, plan: WeightsPlan, correction: float, answer: Answer) -> float:
    """Return the correction for the next forecast of a model that gave that answer by plan.

    It goes most of the way from correction, which was there before, to what would have been right
    for what was really read: a cache that was cold, or a hit curve that is not yet known, is no
    fault of the machine's speeds.
    """
    read_bytes = answer.read_bytes_per_token if plan.expert_blocks else None
    expected = correction / cost.decode(plan, read_bytes).seconds
    correction *= math.pow(answer.tokens_per_s / expected, _LEARNING)
    return min(max(correction, _LEAST_CORRECTION), _MOST_CORRECTION)


def _more_memory(
    model: CostModel, budget_bytes: int, plan: WeightsPlan, correction: float
) -> MoreMemory:
    decode = model.decode(plan)
    return MoreMemory(
        budget_bytes=budget_bytes,
        mode=plan.mode,
        decode_tokens_per_s=correction / decode.seconds,
        limit=model.limit(plan, decode),
    )
