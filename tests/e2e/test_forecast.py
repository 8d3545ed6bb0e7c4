"""A server that knows the machine: what it tells at start and in /api/ps, and what it learns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_plans
import httpx
import pytest
from serving import Server
from waiting import wait_until

pytestmark = pytest.mark.e2e

STREAMED = ("--mode", "dense-ffn-streaming", "--memory", "150MiB", "--context", "512")


@pytest.fixture
def server(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that streams its model, on a machine that passes for measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    golden_plans.pretend(smollm2_path, 3e9)
    server = Server(smollm2_path, tmp_path / "log", STREAMED)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def generate(server: Server, **body: Any) -> None:
    body = {"model": server.names()[0], "stream": False, **body}
    httpx.post(f"{server.url}/api/generate", json=body, timeout=100).raise_for_status()


def told(server: Server) -> dict[str, Any]:
    """Return what /api/ps tells beside Ollama's fields."""
    [model] = httpx.get(f"{server.url}/api/ps").json()["models"]
    ours: dict[str, Any] = model["headrace"]
    return ours


def test_forecast_is_told_and_corrected_after_the_model_was_unloaded(
    server: Server, tmp_path: Path
) -> None:
    ours = told(server)
    assert ours["mode"] == "dense-ffn-streaming"
    assert ours["budget_bytes"] == 150 << 20
    assert ours["streamed_bytes"] > 0
    before = ours["forecast"]
    assert before["decode_tokens_per_s"] > 0
    assert before["correction"] == 1
    for start in ("ready: ", "mode: ", "memory: ", "disk: ", "forecast: ", "more memory: "):
        assert f" {start}" in server.log()

    counting = {"temperature": 0, "num_predict": 70}
    generate(server, prompt="1, 2, 3, 4, 5,", raw=True, options=counting)
    assert "64 tokens at " in server.log()
    assert not list(tmp_path.rglob("corrections-*.json"))
    generate(server, keep_alive=0)
    wait_until(lambda: list(tmp_path.rglob("corrections-*.json")) != [], "a correction")

    generate(server)
    after = told(server)["forecast"]
    assert after["correction"] != 1
    ratio = after["decode_tokens_per_s"] / before["decode_tokens_per_s"]
    assert ratio == pytest.approx(after["correction"])


def test_machine_is_measured_at_the_first_start_and_not_again(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for is_first in (True, False):
        server = Server(smollm2_path, tmp_path / "log", ("--measure", "once"))
        try:
            server.wait_ready()
            assert told(server)["forecast"]["decode_tokens_per_s"] > 0
            assert (" measures this machine, once" in server.log()) == is_first
            assert " forecast: " in server.log()
        finally:
            server.stop()
    assert len(list(tmp_path.rglob("profile-*.json"))) == 1


def test_machine_is_not_measured_where_that_is_not_wanted(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = Server(smollm2_path, tmp_path / "log", ("--measure", "never"))
    try:
        server.wait_ready()
        assert told(server)["forecast"] is None
    finally:
        server.stop()
