"""A chat of the size and shape that coding agents send, against a model with sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, serve, stream

pytestmark = pytest.mark.e2e

N_CTX = 32768
# Gemma 3 270M comes without a chat template; this one is Gemma's, with tools.
TEMPLATE = """{{ bos_token }}{% for message in messages %}<start_of_turn>\
{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content }}{% if loop.first and tools %}
Tools: {{ tools | tojson }}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name} on a path of the workspace.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": ["string", "null"], "minLength": 1}},
                "required": ["path"],
                "patternProperties": {"^x-": {"type": "string"}},
            },
        },
    }
    for name in ("apply_patch", "edit", "exec", "ls", "read", "write")
]
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
        "tools": TOOLS,
        "options": {"num_ctx": N_CTX, "num_predict": 16, "temperature": 0},
        "think": False,
        "truncate": False,
        "shift": False,
    }


@pytest.fixture(scope="module")
def server(gemma3_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("agent")
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    with serve(
        gemma3_path, folder / "log", "--chat-template-file", str(template), "--parallel", "2"
    ) as server:
        yield server


@pytest.mark.timeout(400)
def test_second_turn_of_a_12000_token_chat_evaluates_only_its_tail(server: Server) -> None:
    name = server.names()[0]
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
def test_prompt_above_the_window_gets_the_400_that_starts_a_compaction(server: Server) -> None:
    name = server.names()[0]
    messages = [{"role": "system", "content": RULES * 4}, {"role": "user", "content": "hi"}]
    answer = httpx.post(f"{server.url}/api/chat", json=body(name, messages), timeout=120)
    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("application/json")
    assert "prompt too long; exceeded max context length by" in answer.json()["error"]
