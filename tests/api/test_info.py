"""/api/tags, /api/show and /api/ps."""

from __future__ import annotations

import asyncio
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.engine.messages import Status

pytestmark = pytest.mark.anyio


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    return await client.post(path, json=body)


async def test_tags_describe_every_model(client: httpx.AsyncClient) -> None:
    models = {model["name"]: model for model in (await client.get("/api/tags")).json()["models"]}
    assert set(models) == {"m:latest", "tools:latest", "thinker:latest", "bert:latest"}
    m = models["m:latest"]
    assert m["model"] == "m:latest"
    assert m["size"] > 0
    assert len(m["digest"]) == 64
    assert datetime.fromisoformat(m["modified_at"]).tzinfo is not None
    assert m["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "64",
        "quantization_level": "F32",
        "context_length": 8192,
        "embedding_length": 8,
    }
    assert "expires_at" not in m
    assert models["bert:latest"]["capabilities"] == ["embedding"]
    assert models["tools:latest"]["capabilities"] == ["completion", "tools"]


async def test_tags_list_the_newest_first(client: httpx.AsyncClient) -> None:
    stamps = [model["modified_at"] for model in (await client.get("/api/tags")).json()["models"]]
    assert stamps == sorted(stamps, reverse=True)


@pytest.mark.parametrize("key", ["model", "name"])
async def test_show_tells_what_the_file_says(client: httpx.AsyncClient, key: str) -> None:
    shown = (await client.post("/api/show", json={key: "M"})).json()
    info = shown["model_info"]
    assert info["general.architecture"] == "llama"
    assert info["general.parameter_count"] == 64
    assert info["llama.context_length"] == 8192
    assert info["tokenizer.ggml.tokens"] is None
    assert not {"general.name", "tokenizer.chat_template"} & set(info)
    assert shown["capabilities"] == ["completion"]
    assert shown["template"].startswith("{% for m in messages %}")
    assert "# FROM m:latest" in shown["modelfile"]
    assert shown["tensors"] == [{"name": "blk.0.attn_q.weight", "type": "F32", "shape": [8, 8]}]
    assert "context_length" not in shown["details"]
    assert "system" not in shown


async def test_verbose_show_has_the_arrays_and_system_is_shown(client: httpx.AsyncClient) -> None:
    shown = (await post(client, "/api/show", model="m", verbose=True, system="Be brief.")).json()
    assert shown["model_info"]["tokenizer.ggml.tokens"] == ["a", "b"]
    assert shown["system"] == "Be brief."
    assert 'SYSTEM """Be brief."""' in shown["modelfile"]


async def test_copilot_sees_the_name_it_asked_for(client: httpx.AsyncClient) -> None:
    agent = {"user-agent": "GitHubCopilotChat/1.2"}
    shown = (await client.post("/api/show", json={"model": "m"}, headers=agent)).json()
    assert shown["model_info"]["general.basename"] == "m"


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({}, 400, "model is required"),
        ({"model": "x"}, 404, "model 'x:latest' not found"),
        ({"model": "library/x:1b"}, 404, "model 'x:1b' not found"),
        ({"model": "../etc"}, 400, "invalid model name"),
    ],
)
async def test_show_says_what_is_wrong(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, error: str
) -> None:
    answer = await client.post("/api/show", json=body)
    assert (answer.status_code, answer.json()) == (status, {"error": error})


async def test_ps_is_empty_at_first_and_lists_a_loaded_model(client: httpx.AsyncClient) -> None:
    assert (await client.get("/api/ps")).json() == {"models": []}
    await post(client, "/api/generate", model="m", prompt="x")
    [model] = (await client.get("/api/ps")).json()["models"]
    assert model["name"] == model["model"] == "m:latest"
    assert (model["size"], model["size_vram"], model["context_length"]) == (6000, 0, 4096)
    assert len(model["digest"]) == 64
    assert "context_length" not in model["details"]


async def test_ps_tells_tiers_forecast_and_what_is_measured_under_one_key_of_ours(
    client: httpx.AsyncClient, engines: Any
) -> None:
    await post(client, "/api/generate", model="m", prompt="x")
    engines.started[-1].dispatch(
        Status(measured_tokens_per_s=2.25, cache_share=0.5, parked_bytes=300)
    )
    [model] = (await client.get("/api/ps")).json()["models"]
    ours = model.pop("headrace")
    assert set(model) == {
        "name", "model", "size", "digest", "details", "expires_at", "size_vram", "context_length",
    }  # fmt: skip
    forecast = ours.pop("forecast")
    assert ours == {
        "mode": "dense-ffn-streaming", "budget_bytes": 9000, "resident_bytes": 4000,
        "stream_bytes": 500, "streamed_bytes": 1000, "vram_bytes": 0,
        "measured_tokens_per_s": 2.25, "cache_share": 0.5, "parked_bytes": 300,
    }  # fmt: skip
    assert (forecast["decode_tokens_per_s"], forecast["limit"]) == (2.5, "disk")
    assert forecast["more_memory"][0]["decode_tokens_per_s"] == 7


async def test_ps_tells_nothing_of_ours_while_a_model_loads(
    client: httpx.AsyncClient, engines: Any
) -> None:
    engines.gate.clear()
    loading = asyncio.ensure_future(post(client, "/api/generate", model="m", prompt="x"))
    async with asyncio.timeout(5):
        while not (models := (await client.get("/api/ps")).json()["models"]):
            await asyncio.sleep(0.01)
    assert "headrace" not in models[0]
    engines.gate.set()
    await loading


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        (None, 300),
        (10, 10),
        (0.5, 0.5),
        ("10m", 600),
        ("1h30m", 5400),
        ("300", 300),
        ("1.5h", 5400),
    ],
)
async def test_keep_alive_moves_expires_at(
    client: httpx.AsyncClient, keep_alive: object, seconds: float
) -> None:
    await post(client, "/api/generate", model="m", keep_alive=keep_alive)
    [model] = (await client.get("/api/ps")).json()["models"]
    expires_at = datetime.fromisoformat(model["expires_at"])
    left_s = (expires_at - datetime.now(expires_at.tzinfo)).total_seconds()
    assert left_s == pytest.approx(seconds, abs=5)


@pytest.mark.parametrize("keep_alive", [-1, "-1m", "-1", 1e30, 1e10])
async def test_forever_is_a_date_centuries_ahead(
    client: httpx.AsyncClient, keep_alive: object
) -> None:
    await post(client, "/api/chat", model="m", keep_alive=keep_alive)
    [model] = (await client.get("/api/ps")).json()["models"]
    expires_at = datetime.fromisoformat(model["expires_at"])
    assert timedelta(days=290 * 365) < expires_at - datetime.now(expires_at.tzinfo)
    assert expires_at.year < 2400


@pytest.mark.parametrize(
    ("keep_alive", "error"),
    [
        ("abc", 'time: invalid duration "abc"'),
        ("", 'time: invalid duration ""'),
        (True, "Unsupported type: 'boolean'"),
        ([], "Unsupported type: 'array'"),
        ({}, "Unsupported type: 'object'"),
    ],
)
async def test_bad_keep_alive_is_400(
    client: httpx.AsyncClient, keep_alive: object, error: str
) -> None:
    answer = await post(client, "/api/generate", model="m", keep_alive=keep_alive)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(error)


async def test_a_file_that_is_gone_is_an_error_and_not_a_crash(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    os.unlink(tmp_path / "m.gguf")
    answer = await post(client, "/api/show", model="m")
    assert answer.status_code == 500
    assert "m.gguf" in answer.json()["error"]
