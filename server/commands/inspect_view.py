"""An Inspection as tables for people, in any width of terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.config.units import format_bytes, format_duration, format_figure
from headrace.engine.forecast import MORE_PERCENT
from headrace.engine.library import format_parameter_count
from headrace.engine.messages import Forecast
from headrace.server.announcement import describe_speed
from headrace.server.commands.inspection import (
    BlockSize,
    GpuFacts,
    Inspection,
    ModelFacts,
    PlanFacts,
    Refusal,
    TensorPlace,
)

_BARS = "▁▂▃▄▅▆▇█"
# Types with less of a model than this are not worth a word.
_LEAST_SHARE = 0.01


def show(inspection: Inspection, console: Console) -> None:
    """Print inspection to console."""
    model = inspection.model
    console.print(Text(model.name, style="bold"))
    console.print(_rows(_model(model)))
    if inspection.tensors is not None:
        console.print(_tensors(inspection.tensors))
    if inspection.refusal is not None:
        _show_refusal(inspection.refusal, console)
        return
    assert inspection.plan is not None, "there is a plan or a refusal"
    _show_plan(inspection.plan, model, console)
    if inspection.forecast is None:
        console.print(
            "No forecast: this machine, or the disk that holds the model, was not measured yet."
            f" `headrace profile {model.path}` does that.",
            soft_wrap=False,
        )
    else:
        console.print(Text("\nforecast", style="bold"))
        console.print(_rows(_forecast(inspection.forecast, model)))


def _model(model: ModelFacts) -> Iterable[tuple[str, str]]:
    files = f", the first of {model.n_files} files" if model.n_files > 1 else ""
    yield "file", f"{model.path}{files}"
    parameters = format_parameter_count(model.n_parameters)
    yield "size", f"{format_bytes(model.n_bytes)}, {parameters} parameters, {model.quantization}"
    yield "architecture", f"{model.architecture}, {model.n_blocks} blocks"
    if model.n_experts:
        yield "experts", f"{model.n_experts} in a block, {model.n_experts_used} used by a token"
    all_bytes = sum(size.n_bytes for size in model.types)
    shares = [(size.type, size.n_bytes / all_bytes) for size in model.types]
    yield "types", ", ".join(f"{t} {_percent(s)}" for t, s in shares if s >= _LEAST_SHARE)
    yield "context", f"{model.n_ctx_train} tokens at most"
    yield "chat template", "yes" if model.has_chat_template else "no"


def _show_plan(plan: PlanFacts, model: ModelFacts, console: Console) -> None:
    console.print(Text.assemble(("\nplan", "bold"), f" {plan.mode}"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    table.add_column(overflow="fold")
    for where, n_bytes, what in _tiers(plan, model):
        table.add_row(where, format_bytes(n_bytes), what)
    console.print(table)
    console.print(Text("\nblocks, and how much of each is in memory", style="bold"))
    console.print(bars(plan.blocks))
    if plan.gpu is not None:
        title = f"\nblocks, and how much of each is in the memory of {plan.gpu.name}"
        console.print(Text(title, style="bold"))
        console.print(bars(plan.blocks, lambda block: block.vram_bytes))


def _tiers(plan: PlanFacts, model: ModelFacts) -> Iterable[tuple[str, int, str]]:
    if plan.gpu is not None:
        yield from _vram(plan.gpu)
    streams_experts = plan.n_experts_cached > 0
    everything = "all" if plan.gpu is None else "all others"
    kept = everything if not plan.streamed_bytes else "every token needs them"
    if plan.streamed_bytes and not streams_experts:
        kept = "what every token needs, as far as it fits"
    yield "RAM, weights", plan.resident_bytes, kept
    if streams_experts:
        yield "RAM, experts", plan.stream_bytes, f"{plan.n_experts_cached} experts, those used last"
    elif plan.streamed_bytes:
        slots = f"{plan.n_ring_slots} slots for what is read"
        yield "RAM, ring", plan.stream_bytes, slots
    cells = f"{plan.n_ctx} tokens each, {plan.n_cells} together, {plan.kv_type}"
    yield "RAM, context", plan.context_bytes, cells
    yield "RAM, prompts", plan.parking_bytes, "kept for later, at most"
    yield "RAM, process", plan.buffer_bytes, "and llama.cpp's buffers"
    all_bytes = plan.resident_bytes + plan.stream_bytes + plan.context_bytes
    all_bytes += plan.parking_bytes + plan.buffer_bytes
    yield "RAM, all", all_bytes, f"of {format_bytes(plan.budget_bytes)}"
    if plan.streamed_bytes:
        read = "read for each token"
        if streams_experts:
            read = "all experts, read when not in RAM"
        yield "disk", plan.streamed_bytes, read


def _vram(gpu: GpuFacts) -> Iterable[tuple[str, int, str]]:
    yield "VRAM, weights", gpu.weights_bytes, f"{gpu.n_layers} layers on {gpu.name}"
    yield "VRAM, context", gpu.context_bytes, "of these layers"
    yield "VRAM, buffers", gpu.buffer_bytes, "of llama.cpp"
    all_bytes = gpu.weights_bytes + gpu.context_bytes + gpu.buffer_bytes
    yield "VRAM, all", all_bytes, f"of {format_bytes(gpu.budget_bytes)}"


def bars(
    blocks: Iterable[BlockSize],
    n_bytes: Callable[[BlockSize], int] = lambda block: block.resident_bytes,
) -> Text:
    """Return a bar for each block, as high as its share in memory, with the range of the shares."""
    shares = [n_bytes(block) / block.n_bytes for block in blocks]
    chart = "".join(_BARS[min(int(share * len(_BARS)), len(_BARS) - 1)] for share in shares)
    low, high = _percent(min(shares)), _percent(max(shares))
    return Text(f"{chart} {low if low == high else f'{low} to {high}'}", overflow="fold")


def _forecast(forecast: Forecast, model: ModelFacts) -> Iterable[tuple[str, str]]:
    yield "answer", describe_speed(forecast)
    if forecast.expert_hit_rate is not None:
        source = "as learnt" if forecast.hit_rate_source == "learnt" else "assumed, not learnt yet"
        yield "experts", f"{_percent(forecast.expert_hit_rate)} are in RAM when chosen ({source})"
    yield "prompt", f"{_seconds(forecast.ttft_s_per_1000_tokens)} for each 1000 tokens"
    yield "load", _seconds(forecast.load_s)
    for percent, more in zip(MORE_PERCENT, forecast.more_memory, strict=True):
        speed = f"{format_figure(more.decode_tokens_per_s)} tokens/s"
        if more.decode_tokens_per_s > forecast.decode_tokens_per_s:
            yield f"memory +{percent} %", f"{format_bytes(more.budget_bytes)}: {speed}, {more.mode}"
    if forecast.correction != 1:
        yield "corrected", f"by {forecast.correction:.2f}, learnt from earlier answers"
    if forecast.unmeasured_types:
        names = ", ".join(forecast.unmeasured_types)
        measure = f"`headrace profile {model.path}`"
        yield "not measured", f"{names}, taken for the slowest type that was; {measure} does it"


def _show_refusal(refusal: Refusal, console: Console) -> None:
    console.print(Text("\nno plan", style="bold"))
    console.print(refusal.reason, markup=False)
    if refusal.helpful_flags:
        console.print("Any of these would help:")
        for flags in refusal.helpful_flags:
            console.print(f"  {flags}", markup=False)


def _tensors(tensors: Iterable[TensorPlace]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tensor", "type", "shape"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right", overflow="fold")
    table.add_column("place", overflow="fold")
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape))
        size = format_bytes(tensor.n_bytes)
        table.add_row(tensor.name, tensor.type, shape, size, tensor.place or "")
    return table


def _rows(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{format_figure(seconds)} s" if seconds < 120 else format_duration(round(seconds))
