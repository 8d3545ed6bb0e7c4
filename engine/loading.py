"""How a model is loaded in this process: from a Load to an Engine, for all who run one.

In: a Load. Out: a LoadedEngine. Knows neither sockets nor terminals: who asks for an engine also
gives it a thread and takes its events.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.engine import placement
from headrace.engine.corrections import keep_correction, read_corrections
from headrace.engine.forecast import (
    NO_CORRECTION,
    Correction,
    at_disk_speed,
    calibrate,
    calibrate_load,
    calibrate_prefill,
    forecast_load,
)
from headrace.engine.gguf import Header, read_model
from headrace.engine.hardware import this_machine
from headrace.engine.memory import spare_bytes, this_memory
from headrace.engine.messages import Event, Forecast, Load, Loaded, Tiers
from headrace.engine.openmp import installed_environment
from headrace.engine.pace import Pace
from headrace.engine.pass_time import CostModel
from headrace.engine.plan import WeightsPlan, describe
from headrace.engine.profile_cache import read_measured
from headrace.engine.routing import ExpertUsage
from headrace.engine.tensors import ExpertBlock, TensorTable, name_patterns, read_tensors
from headrace.engine.usage import keep_usage, narrowed, read_usage, widened

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.llama import Model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An Engine that is ready to run, and how its model was loaded."""

    engine: Engine
    load: Load
    header: Header
    plan: WeightsPlan
    expert_blocks: tuple[ExpertBlock, ...]
    """All of the model, streamed or not."""
    budget_bytes: int
    usage: ExpertUsage | None
    """What was known of the experts before."""
    cost: CostModel | None
    """What the forecast is made of; None: there is none."""
    correction: Correction
    """What the forecast was corrected by."""
    forecast: Forecast | None
    load_ns: int
    load_bytes: int
    """Read from the disk meanwhile, and not from its cache."""

    @property
    def message(self) -> Loaded:
        """What is told to those who can't see the engine."""
        engine, vocab, model = self.engine, self.engine.vocab, self.engine.model
        return Loaded(
            n_ctx=engine.n_ctx,
            n_ctx_train=model.n_ctx_train,
            n_slots=self.load.n_slots,
            n_vocab=vocab.n_tokens,
            control_tokens=vocab.control_texts(),
            bos=vocab.text(vocab.bos),
            eos=vocab.text(vocab.eos),
            adds_bos=vocab.adds_bos,
            weights_bytes=model.size_bytes,
            context_bytes=engine.plan.n_bytes + engine.plan.vram_bytes,
            load_ns=self.load_ns,
            tiers=Tiers(
                mode=self.plan.mode,
                budget_bytes=self.budget_bytes,
                resident_bytes=self.plan.resident_bytes,
                stream_bytes=self.plan.stream_bytes,
                streamed_bytes=sum(tensor.n_bytes for tensor in self.plan.streamed),
                vram_bytes=self.plan.vram_bytes - self.plan.vram_kv_bytes + engine.plan.vram_bytes,
            ),
            forecast=self.forecast,
        )

    def keep_learnt(self) -> None:
        """Write down what was learnt of experts and speed; when the engine has stopped."""
        cost, plan, before, pace = self.cost, self.plan, self.correction, self.engine.pace
        answer = pace.median
        if cost is not None and (answer is not None or pace.prompts):
            correction = Correction(
                decode=calibrate(cost, plan, before.decode, answer) if answer else before.decode,
                prefill=calibrate_prefill(cost, plan, before.prefill, pace.prompts),
                load=calibrate_load(cost, plan, before.load, self.load_ns / 1e9, self.load_bytes),
            )
            keep_correction(self.header, cost.profile.key, plan.way, correction)
        stream = self.engine.model.stream
        usage = None if stream is None else stream.usage()
        if usage is not None:
            every = widened(usage, self.expert_blocks, streamed_blocks(self.plan))
            keep_usage(self.header, every, self.usage)


def load_engine(
    load: Load, emit: Callable[[list[Event]], None], *, repacks: bool = True
) -> LoadedEngine:
    """Load the model that load names and make its Engine, which gives its events to emit.

    What stays in memory is repacked for the processor unless repacks is false.

    Raises:
        EngineError: the model can't be loaded.
    """
    started, bytes_before = time.perf_counter_ns(), _disk_bytes()
    for name, value in installed_environment().items():
        os.environ.setdefault(name, value)
    # Only now: the OpenMP library reads its environment when llama.cpp loads it.
    from headrace.engine import context_cost, engine, llama, weights

    header = read_model(Path(load.path), weights.open_direct)
    budget = budget_bytes(load)
    table = read_tensors(header)
    usage = read_usage(header, table.experts) if table.experts else None
    llama.start_backend()
    load, cost = _with_cost(header, load, table, usage)
    load = context_cost.with_context_cost(header, load)
    plan = placement.plan_model(header, table, load, budget, cost)
    logger.info("%s", describe(plan, budget))
    correction, expected = _forecast(header, load, plan, budget, cost)
    model = _load_model(header, plan, repacks=repacks)
    if model.stream is not None and plan.expert_blocks and usage is not None:
        model.stream.expect(narrowed(usage, table.experts, streamed_blocks(plan)))
    plan_context = partial(placement.plan_model_context, header, load, plan, budget)
    pace = Pace(expected.decode_tokens_per_s if expected else None, bytes_read=_counter(model))
    made = engine.Engine(model, load, plan_context, emit, n_ubatch=plan.n_ubatch, pace=pace)
    _warn_of_context(header, load, made.n_ctx)
    load_ns, n_read = time.perf_counter_ns() - started, _disk_bytes() - bytes_before
    return LoadedEngine(
        made, load, header, plan, table.experts, budget, usage, cost, correction, expected,
        load_ns, n_read,
    )  # fmt: skip


def budget_bytes(load: Load) -> int:
    """Return the memory that load may take: what it says, else what the machine has to spare."""
    return load.memory_bytes or spare_bytes(this_memory().available_bytes)


def pin(cpus: tuple[int, ...]) -> None:
    """Keep the calling thread, and those that it will start, on cpus; empty means anywhere."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def _with_cost(
    header: Header, load: Load, table: TensorTable, usage: ExpertUsage | None
) -> tuple[Load, CostModel | None]:
    """Return load with the speed of its disk, and what passes cost; None: it was not measured."""
    measured = read_measured(this_machine(), load.n_threads, header.path)
    if measured is None:
        return load, None
    return at_disk_speed(load, measured[1]), _with_gpu_now(CostModel.of(*measured, table, usage))


def _with_gpu_now(cost: CostModel) -> CostModel:
    """Return cost with what its GPU has free now; without one if this llama.cpp can't use it."""
    from headrace.engine import ggml

    gpu = cost.gpu
    found = None if gpu is None else ggml.find_gpu(gpu.name)
    if gpu is None or found is None:
        return replace(cost, gpu=None)
    free, total = found.memory_bytes()
    return replace(cost, gpu=msgspec.structs.replace(gpu, free_bytes=free, total_bytes=total))


def _forecast(
    header: Header, load: Load, plan: WeightsPlan, budget_bytes: int, cost: CostModel | None
) -> tuple[Correction, Forecast | None]:
    """Return what to expect of a model; nothing is measured for it here, that takes seconds."""
    if cost is None:
        logger.info(
            "no forecast: this machine with %d threads, or the disk that holds the model, was not"
            " measured yet; `headrace profile %s` does that, with as many threads as by default",
            load.n_threads, header.path,
        )  # fmt: skip
        return NO_CORRECTION, None
    corrections = read_corrections(header, cost.profile.key)
    correction = corrections.get(plan.way, NO_CORRECTION)
    return correction, forecast_load(header, load, plan, budget_bytes, cost, correction=correction)


def _warn_of_context(header: Header, load: Load, n_ctx: int) -> None:
    n_wanted = min(load.n_ctx, header.context_length or load.n_ctx)
    if n_ctx < n_wanted:
        logger.warning(
            "the context is %d tokens instead of %d, more does not fit; --context sets another",
            n_ctx, n_wanted,
        )  # fmt: skip


def streamed_blocks(plan: WeightsPlan) -> frozenset[int]:
    """Return the numbers of the blocks whose experts are streamed."""
    return frozenset(block.block for blocks in plan.expert_blocks for block in blocks)


def _disk_bytes() -> int:
    """Return what this process has had read from disks; what caches gave is not counted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512


def _counter(model: Model) -> Callable[[], int]:
    """Return what tells how many bytes of the model's weights were read since it was loaded."""
    stream = model.stream
    return (lambda: 0) if stream is None else (lambda: stream.stats().bytes_read)


def _load_model(header: Header, plan: WeightsPlan, *, repacks: bool) -> Model:
    """Load the model as planned, by llama.cpp's own loader or through a stream."""
    from headrace.engine import ggml, llama, streaming

    stream = None
    if plan.mode != "full-resident" or _is_tight(header, plan):
        stream = streaming.WeightStream(header, plan, llama.streaming_functions())
    gpu = ggml.find_gpu(plan.gpu) if plan.gpu else None
    in_memory = llama.cpu_buffer_type()
    return llama.Model(
        header.path, repacks=repacks, stream=stream,
        overrides=[(pattern, in_memory) for pattern in name_patterns(plan.in_ram)],
        gpu=None if gpu is None else gpu.device, n_gpu_layers=plan.n_gpu_layers,
        lends_weights=plan.mode == "full-resident",
    )  # fmt: skip


def _is_tight(header: Header, plan: WeightsPlan) -> bool:
    """Tell whether what stays in memory as a whole leaves no room for its file in the page cache.

    With room the next load finds it there. Without, the file's pages would be in the way of weights
    that are repacked, and those that are not would be read again whenever memory is short.
    """
    if plan.gpu:
        return False  # of what goes to a GPU no pages stay
    file_bytes = sum(file.n_bytes for file in header.files)
    return plan.n_bytes + file_bytes > this_memory().available_bytes
