"""How fast a planned model will be, what will limit it, and what more memory would change.

In: what was measured of the machine, a model's tensors, a plan, what was learnt of its experts.
Out: a Forecast. Pure; knows no file, and stores nothing of what it learns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from headrace.engine.gguf import Header
from headrace.engine.messages import Forecast, Load, MoreMemory
from headrace.engine.pace import Answer, Prompt
from headrace.engine.pass_time import FLOATS, N_PROMPT, PIECE_BYTES, CostModel, n_prefill
from headrace.engine.placement import plan_model
from headrace.engine.plan import WeightsPlan
from headrace.engine.profile import DiskProfile, Profile
from headrace.engine.routing import ExpertUsage
from headrace.engine.tensors import TensorTable

# More memory that is worth telling about, in percent.
MORE_PERCENT = (25, 50, 100)

# Of the seconds expected of a load: what it takes beside reading is learnt down to this.
_LEAST_OTHER = 0.05

# A correction takes this part of the error, measured as a ratio, and stays within bounds: what is
# further off is another fault, such as a busy machine.
_LEARNING = 0.75
_LEAST_CORRECTION, _MOST_CORRECTION = 0.25, 4.0


class Correction(msgspec.Struct, frozen=True):
    """What forecast speeds are multiplied by, as learnt of one model in one mode."""

    decode: float = 1.0
    prefill: float = 1.0
    load: float = 1.0
    """Of all that loading does beside reading."""


NO_CORRECTION = Correction()


def forecast(
    profile: Profile, disk: DiskProfile, table: TensorTable, plan: WeightsPlan, *,
    usage: ExpertUsage | None = None, correction: Correction = NO_CORRECTION,
    larger: Sequence[tuple[int, WeightsPlan]] = (),
) -> Forecast:  # fmt: skip
    """Return what to expect of a model that is loaded from disk as plan says.

    larger are budgets in bytes with their plans; correction is what was learnt.

    Raises:
        EngineError: the profile has no kernels.
    """
    return _forecast(CostModel.of(profile, disk, table, usage), plan, correction, larger)


def _forecast(
    model: CostModel, plan: WeightsPlan, correction: Correction,
    larger: Sequence[tuple[int, WeightsPlan]],
) -> Forecast:  # fmt: skip
    decode, prefill = model.decode(plan), model.prefill(plan)
    types = sorted({tensor.type_name for tensor, _ in model.matrices()} - FLOATS)
    is_routed = bool(plan.expert_blocks)
    return Forecast(
        decode_tokens_per_s=correction.decode / decode.seconds,
        ttft_s_per_1000_tokens=N_PROMPT / n_prefill(plan) * prefill.seconds / correction.prefill,
        load_s=model.load(plan).seconds(correction.load),
        limit=model.limit(plan, decode),
        read_bytes_per_token=decode.read_bytes,
        expert_hit_rate=model.hit_rate(plan) if is_routed else None,
        hit_rate_source=("learnt" if model.is_learnt else "prior") if is_routed else None,
        correction=correction.decode,
        unmeasured_types=tuple(name for name in types if not model.is_measured(name, plan)),
        more_memory=tuple(_more_memory(model, *other, correction.decode) for other in larger),
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
    correction: Correction,
) -> Forecast:  # fmt: skip
    """Return what to expect of a model that is loaded by plan, and of one with larger budgets."""
    budgets = [budget_bytes * (100 + percent) // 100 for percent in MORE_PERCENT]
    larger = [(budget, plan_model(header, cost.table, load, budget, cost)) for budget in budgets]
    return _forecast(cost, plan, correction, larger)


def calibrate(cost: CostModel, plan: WeightsPlan, correction: float, answer: Answer) -> float:
    """Return decode's correction for the next forecast of a model that gave that answer by plan.

    It goes most of the way from correction, which was there before, to what would have been right
    for what was really read: a cache that was cold, or a hit curve that is not yet known, is no
    fault of the machine's speeds.
    """
    read_bytes = answer.read_bytes_per_token if plan.expert_blocks else None
    expected = correction / cost.decode(plan, read_bytes, answer.n_context).seconds
    return _learnt(correction, answer.tokens_per_s / expected)


def calibrate_prefill(
    cost: CostModel, plan: WeightsPlan, correction: float, prompts: Sequence[Prompt]
) -> float:
    """Return the same of prefill, from prompts that were evaluated; none: as it was."""
    if not prompts:
        return correction
    expected = (cost.prompt_s(plan, prompt.n_tokens) / correction for prompt in prompts)
    ratios = (s / prompt.seconds for s, prompt in zip(expected, prompts, strict=True))
    return _learnt(correction, statistics.median(ratios))


def calibrate_load(
    cost: CostModel, plan: WeightsPlan, correction: float, seconds: float, read_bytes: float
) -> float:
    """Return the same of loading, from one that took so long and read so much from the disk.

    What was in the page cache, read by whom ever, is read no faster by the disk.
    """
    time = cost.load(plan)
    read_s = time.seconds(math.inf, read_bytes)
    other_s = max(seconds - read_s, _LEAST_OTHER * time.other_s)
    return _learnt(correction, time.other_s / correction / other_s)


def _learnt(correction: float, ratio: float) -> float:
    """Return correction after a speed that was ratio times what it gave."""
    correction *= math.pow(ratio, _LEARNING)
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
