"""A chat of the size and shape that coding agents send, against a model with sliding windows."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import Server, stream

pytestmark = pytest.mark.e2e

N_CTX = 32768
RULES = " ".join(
    f"Rule {n}: when file {n} of the workspace changes, read it again before you edit it, "
    f"keep its style, and say in one sentence what you did to part {n % 17}."
    for n in range(300)
)
CARRIER = {
    "role": "user",
    "content": "<<<BEGIN_INTERNAL_CONTEXT>>>\nThe time is 14:40. No subagent is running. "
    "Answer the user's last message; use a tool only when it is needed.\n<<<END>>>",
}


def body(name: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": name,
        "messages": messages,
        "stream": True,
        "options": {"num_ctx": N_CTX, "num_predict": 16, "temperature": 0},
        "think": False,
        "truncate": False,
        "shift": False,
    }


@pytest.mark.timeout(400)
def test_second_turn_of_a_12000_token_chat_evaluates_only_its_tail(gemma3_server: Server) -> None:
    server, name = gemma3_server, gemma3_server.names()[0]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": "[Mon 2026-11-30 14:40 UTC] Which rule is about file 12?"},
    ]
    first = stream(server.url, "/api/chat", body(name, [*messages, CARRIER]))[-1].data
    assert first["done"]
    assert 10_000 < first["prompt_eval_count"] < 14_000
    # The carrier at the end goes, the answer and a new question come in its place.
    messages += [
        {"role": "assistant", "content": "Rule 12 is about file 12."},
        {"role": "user", "content": "[Mon 2026-11-30 14:41 UTC] And rule 13?"},
        CARRIER,
    ]
    second = stream(server.url, "/api/chat", body(name, messages))[-1].data
    assert second["prompt_eval_count"] > first["prompt_eval_count"]
    assert second["prompt_eval_count"] - second["prompt_eval_cached_count"] < 500
    (loaded,) = httpx.get(f"{server.url}/api/ps").json()["models"]
    assert loaded["context_length"] == N_CTX


@pytest.mark.timeout(400)
def test_prompt_above_the_window_gets_the_400_that_starts_a_compaction(
    gemma3_server: Server,
) -> None:
    server, name = gemma3_server, gemma3_server.names()[0]
    messages = [{"role": "system", "content": RULES * 4}, {"role": "user", "content": "hi"}]
    answer = httpx.post(f"{server.url}/api/chat", json=body(name, messages), timeout=120)
    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("application/json")
    assert "prompt too long; exceeded max context length by" in answer.json()["error"]
