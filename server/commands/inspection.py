"""What is told of a model before it is loaded: what it is, the plan for it, and the forecast.

In: a model's header, a Load, a budget and, if it is known, the machine's profile. Out: an
Inspection, a value for people and programs. Pure; knows no terminal and reads no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from headrace.engine.errors import DoesNotFit, ModelUnusable
from headrace.engine.forecast import (
    NO_CORRECTION,
    Correction,
    at_disk_speed,
    forecast_load,
)
from headrace.engine.gguf import Header
from headrace.engine.library import Model
from headrace.engine.messages import Forecast, Load, Mode
from headrace.engine.pass_time import CostModel
from headrace.engine.placement import plan_model, plan_model_context
from headrace.engine.plan import ContextPlan, WeightsPlan
from headrace.engine.profile import DiskProfile, Profile
from headrace.engine.routing import ExpertUsage
from headrace.engine.tensors import TensorTable, read_tensors

_BLOCK = re.compile(r"blk\.([0-9]+)\.")

Place = Literal["vram", "memory", "cache", "ring"]
"""Of a tensor: on the GPU or in memory for good, or streamed through expert cache or ring."""


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts."""


class TypeSize(_Value, frozen=True):
    """How much of a model is of one type."""

    type: str
    n_tensors: int
    n_bytes: int


class ModelFacts(_Value, frozen=True):
    """What the header says."""

    name: str
    path: str
    n_files: int
    n_bytes: int
    architecture: str
    n_parameters: int
    quantization: str
    types: tuple[TypeSize, ...]
    """The one with most bytes first."""
    n_blocks: int
    n_ctx_train: int
    n_experts: int
    """Of a block with experts; 0: the model is dense."""
    n_experts_used: int
    has_chat_template: bool


class BlockSize(_Value, frozen=True):
    """A block's weights, and how much of them is in memory at any time."""

    n_bytes: int
    resident_bytes: int
    vram_bytes: int
    """Of resident_bytes, what is on the GPU."""


class GpuFacts(_Value, frozen=True):
    """What of a model is in the memory of a GPU."""

    name: str
    budget_bytes: int
    weights_bytes: int
    context_bytes: int
    buffer_bytes: int
    n_layers: int
    """As llama.cpp counts them: the output, then the layers from the last on."""


class PlanFacts(_Value, frozen=True):
    """Where everything goes; all bytes but those streamed, and gpu's, are memory."""

    mode: Mode
    budget_bytes: int
    resident_bytes: int
    """Weights that stay in memory."""
    stream_bytes: int
    """Memory of the expert cache or the ring."""
    n_experts_cached: int
    n_ring_slots: int
    streamed_bytes: int
    """Weights that are read from the disk when they are needed."""
    context_bytes: int
    n_ctx: int
    """Tokens that each sequence may have."""
    n_cells: int
    """Tokens of all sequences together."""
    kv_type: str
    parking_bytes: int
    """For prompts that are kept outside the context."""
    buffer_bytes: int
    """What the process takes beside that: llama.cpp's buffers, vocabulary, interpreter."""
    gpu: GpuFacts | None
    """None: no GPU is used."""
    blocks: tuple[BlockSize, ...]


class Refusal(_Value, frozen=True):
    """Why there is no plan, and what would make one."""

    reason: str
    needed_bytes: int | None
    """None: more memory would not help."""
    budget_bytes: int
    helpful_flags: tuple[str, ...]


class TensorPlace(_Value, frozen=True):
    """One tensor; shape in GGUF's order, the row first."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    place: Place | None
    """None: there is no plan."""


class Inspection(_Value, frozen=True):
    """All that is told; plan or refusal is there, never both."""

    model: ModelFacts
    plan: PlanFacts | None
    refusal: Refusal | None
    forecast: Forecast | None
    """None: no plan, or the machine was not measured."""
    tensors: tuple[TensorPlace, ...] | None
    """None: not asked for."""


def inspect(
    model: Model, load: Load, budget_bytes: int, measured: tuple[Profile, DiskProfile] | None,
    usage: ExpertUsage | None, corrections: Mapping[str, Correction], *,
    lists_tensors: bool = False,
) -> Inspection:  # fmt: skip
    """Return what is to be told of model when it is loaded as load says.

    measured is the profile of the machine and, in it, of the disk that holds the model; usage and
    corrections are what was learnt of the model's experts and of its speed in each mode.
    """
    header, table = model.header, read_tensors(model.header)
    cost = None
    if measured is not None:
        load = at_disk_speed(load, measured[1])
        cost = CostModel.of(*measured, table, usage)
    facts = _model_facts(model, table)
    try:
        plan = plan_model(header, table, load, budget_bytes, cost)
    except ModelUnusable as error:
        refusal = _refusal(error, budget_bytes)
        tensors = _tensor_places(header, None) if lists_tensors else None
        return Inspection(
            model=facts, plan=None, refusal=refusal, forecast=None, tensors=tensors
        )  # fmt: skip
    expected = None
    if cost is not None:
        correction = corrections.get(plan.way, NO_CORRECTION)
        expected = forecast_load(header, load, plan, budget_bytes, cost, correction=correction)
    return Inspection(
        model=facts,
        plan=_plan_facts(header, load, plan, budget_bytes),
        refusal=None,
        forecast=expected,
        tensors=_tensor_places(header, plan) if lists_tensors else None,
    )


def _model_facts(model: Model, table: TensorTable) -> ModelFacts:
    header = model.header
    sizes: dict[str, list[int]] = {}
    for tensor in header.tensors:
        sizes.setdefault(tensor.type_name, []).append(tensor.n_bytes)
    types = [
        TypeSize(type=name, n_tensors=len(found), n_bytes=sum(found))
        for name, found in sizes.items()
    ]
    return ModelFacts(
        name=str(model.name),
        path=str(model.path),
        n_files=len(header.files),
        n_bytes=model.size_bytes,
        architecture=header.architecture,
        n_parameters=header.parameter_count,
        quantization=model.details.quantization_level,
        types=tuple(sorted(types, key=lambda size: -size.n_bytes)),
        n_blocks=header.block_count,
        n_ctx_train=header.context_length,
        n_experts=max((block.n_experts for block in table.experts), default=0),
        n_experts_used=table.n_used,
        has_chat_template=bool(model.template),
    )


def _plan_facts(header: Header, load: Load, plan: WeightsPlan, budget_bytes: int) -> PlanFacts:
    context = plan_model_context(header, load, plan, budget_bytes, load.n_ctx)
    return PlanFacts(
        mode=plan.mode,
        budget_bytes=budget_bytes,
        resident_bytes=plan.resident_bytes,
        stream_bytes=plan.stream_bytes,
        n_experts_cached=sum(plan.pool_records),
        n_ring_slots=plan.n_ring_slots,
        streamed_bytes=sum(tensor.n_bytes for tensor in plan.streamed),
        context_bytes=context.n_bytes,
        n_ctx=context.n_ctx,
        n_cells=context.n_cells,
        kv_type=load.kv_type,
        parking_bytes=context.parking_bytes,
        buffer_bytes=plan.buffer_bytes,
        gpu=_gpu_facts(plan, context) if plan.gpu else None,
        blocks=_block_sizes(header, plan),
    )


def _gpu_facts(plan: WeightsPlan, context: ContextPlan) -> GpuFacts:
    weights_bytes = sum(tensor.n_bytes for tensor in plan.in_vram)
    return GpuFacts(
        name=plan.gpu,
        budget_bytes=plan.vram_budget_bytes,
        weights_bytes=weights_bytes,
        context_bytes=context.vram_bytes,
        buffer_bytes=plan.vram_bytes - plan.vram_kv_bytes - weights_bytes,
        n_layers=plan.n_gpu_layers,
    )


def _block_sizes(header: Header, plan: WeightsPlan) -> tuple[BlockSize, ...]:
    cached: dict[str, float] = {tensor.name: 0.0 for tensor in plan.streamed}
    for pool, n_records in zip(plan.expert_blocks, plan.pool_records, strict=True):
        share = n_records / sum(block.n_experts for block in pool)
        cached |= {part.name: share for block in pool for part in block.parts}
    in_vram = {tensor.name for tensor in plan.in_vram}
    sizes: dict[int, list[float]] = {}
    for tensor in header.tensors:
        if match := _BLOCK.match(tensor.name):
            size = sizes.setdefault(int(match[1]), [0, 0, 0])
            size[0] += tensor.n_bytes
            size[1] += tensor.n_bytes * cached.get(tensor.name, 1.0)
            size[2] += tensor.n_bytes * (tensor.name in in_vram)
    return tuple(
        BlockSize(n_bytes=int(n_bytes), resident_bytes=int(resident), vram_bytes=int(vram))
        for _, (n_bytes, resident, vram) in sorted(sizes.items())
    )


def _refusal(error: ModelUnusable, budget_bytes: int) -> Refusal:
    if not isinstance(error, DoesNotFit):
        return Refusal(
            reason=str(error), needed_bytes=None, budget_bytes=budget_bytes, helpful_flags=()
        )
    memory = f"--memory {math.ceil(error.needed_bytes / 2**20)}MiB"
    return Refusal(
        reason=str(error), needed_bytes=error.needed_bytes, budget_bytes=budget_bytes,
        helpful_flags=(memory, *error.helpful_flags),
    )  # fmt: skip


def _tensor_places(header: Header, plan: WeightsPlan | None) -> tuple[TensorPlace, ...]:
    places: dict[str, Place | None] = {}
    if plan is not None:
        places = {tensor.name: "memory" for tensor in header.tensors}
        through: Place = "cache" if plan.expert_blocks else "ring"
        places |= {tensor.name: through for tensor in plan.streamed}
        places |= {tensor.name: "vram" for tensor in plan.in_vram}
    return tuple(
        TensorPlace(
            name=tensor.name, shape=tensor.shape, type=tensor.type_name, n_bytes=tensor.n_bytes,
            place=places.get(tensor.name),
        )
        for tensor in header.tensors
    )  # fmt: skip
