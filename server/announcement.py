"""What the log says of the model that a server starts with: six lines.

In: a model, where it is reached, what its engine said of it. Out: lines of text.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.units import format_bytes, format_figure
from headrace.engine.library import Model
from headrace.engine.messages import Forecast, Limit, Loaded, Tiers

_LIMITS: dict[Limit, str] = {
    "disk": "the disk", "memory bandwidth": "memory bandwidth", "compute": "compute",
}  # fmt: skip


def announce(model: Model, url: str, loaded: Loaded) -> Iterator[str]:
    """Yield lines with model, endpoint, mode, tiers and forecast.

    Why there is no forecast the engine has logged when it loaded the model.
    """
    tiers, forecast = loaded.tiers, loaded.forecast
    yield f"ready: {model.name} answers on {url}"
    yield f"mode: {tiers.mode} in {format_bytes(tiers.budget_bytes)}"
    yield f"memory: {format_bytes(tiers.resident_bytes)} of weights{_stream(tiers)}"
    yield f"disk: {_disk(tiers)}"
    if forecast is None:
        return
    prompt = f"{format_figure(forecast.ttft_s_per_1000_tokens)} s for 1000 tokens of a prompt"
    yield f"forecast: {describe_speed(forecast)}; {prompt}"
    yield f"more memory: {_more(forecast)}"


def describe_speed(forecast: Forecast) -> str:
    """Return how fast answers are, and why not faster."""
    speed = f"{format_figure(forecast.decode_tokens_per_s)} tokens/s"
    text = f"{speed}, limited by {_LIMITS[forecast.limit]}"
    if forecast.read_bytes_per_token:
        text += f", {format_bytes(int(forecast.read_bytes_per_token))} read for each"
    return text


def _stream(tiers: Tiers) -> str:
    what = "cached experts" if tiers.mode == "expert-streaming" else "the ring"
    return f", {format_bytes(tiers.stream_bytes)} for {what}" if tiers.stream_bytes else ""


def _disk(tiers: Tiers) -> str:
    if not tiers.streamed_bytes:
        return "nothing is read once the weights are in memory"
    read = "of experts, read when they are not cached"
    if tiers.mode != "expert-streaming":
        read = "of weights, read for each token"
    return f"{format_bytes(tiers.streamed_bytes)} {read}"


def _more(forecast: Forecast) -> str:
    texts = [
        f"{format_bytes(more.budget_bytes)} for {format_figure(more.decode_tokens_per_s)} tokens/s"
        for more in forecast.more_memory
        if more.decode_tokens_per_s > forecast.decode_tokens_per_s
    ]
    return ", ".join(texts) or "would not be faster"
