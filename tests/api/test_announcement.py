"""What the log says of the first model when it is ready."""

from __future__ import annotations

import msgspec
import pytest

from headrace.engine.library import Model
from headrace.engine.messages import Loaded, Mode
from headrace.server.announcement import announce
from headrace.server.models import Models

pytestmark = pytest.mark.anyio
URL = "http://127.0.0.1:8080"


@pytest.fixture
def model(models: Models) -> Model:
    return models.find("m")


@pytest.fixture
async def loaded(models: Models, model: Model) -> Loaded:
    with models.lease(model) as lease:
        return (await lease.loaded()).engine.loaded


async def test_six_lines_tell_model_endpoint_mode_tiers_and_forecast(
    model: Model, loaded: Loaded
) -> None:
    assert list(announce(model, URL, loaded)) == [
        f"ready: m:latest answers on {URL}",
        "mode: dense-ffn-streaming in 8.79 KiB",
        "memory: 3.91 KiB of weights, 500 B for the ring",
        "disk: 1000 B of weights, read for each token",
        "forecast: 2.5 tokens/s, limited by the disk, 1000 B read for each;"
        " 40 s for 1000 tokens of a prompt",
        "more memory: 10.99 KiB for 7 tokens/s",
    ]


async def test_without_a_forecast_four_lines_tell_the_rest(model: Model, loaded: Loaded) -> None:
    lines = announce(model, URL, msgspec.structs.replace(loaded, forecast=None))
    assert [line.partition(":")[0] for line in lines] == ["ready", "mode", "memory", "disk"]


@pytest.mark.parametrize(
    ("mode", "streamed_bytes", "memory", "disk"),
    [
        ("full-resident", 0, "memory: 3.91 KiB of weights", "nothing is read"),
        ("expert-streaming", 1000, "500 B for cached experts", "1000 B of experts, read when"),
    ],
)
async def test_tiers_are_those_of_the_mode(
    mode: Mode, streamed_bytes: int, memory: str, disk: str, model: Model, loaded: Loaded
) -> None:
    tiers = msgspec.structs.replace(
        loaded.tiers, mode=mode, streamed_bytes=streamed_bytes,
        stream_bytes=500 if streamed_bytes else 0,
    )  # fmt: skip
    lines = list(announce(model, URL, msgspec.structs.replace(loaded, tiers=tiers)))
    assert lines[2].endswith(memory)
    assert disk in lines[3]


async def test_memory_that_would_not_help_is_said_to_be_so(model: Model, loaded: Loaded) -> None:
    assert loaded.forecast is not None
    forecast = msgspec.structs.replace(loaded.forecast, decode_tokens_per_s=7.0)
    *_, more = announce(model, URL, msgspec.structs.replace(loaded, forecast=forecast))
    assert more == "more memory: would not be faster"
