"""/api/chat: what the engine is asked for and what the client gets."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from headrace.engine.messages import Failed, Generate

pytestmark = pytest.mark.anyio

HI = {"role": "user", "content": "hi"}


async def post(client: httpx.AsyncClient, *messages: Any, **body: Any) -> httpx.Response:
    return await client.post("/api/chat", json={"model": "m", "messages": messages, **body})


def prompt_of(request: Generate) -> str:
    return "".join(segment.text for segment in request.prompt)


async def test_stream_has_a_message_in_every_record(client: httpx.AsyncClient) -> None:
    answer = await post(client, HI)
    text = re.sub(r"\d{4}-[-0-9T:.]+Z", "T", answer.text)
    text = re.sub(r'("(?:total|load)_duration":)[1-9]\d*', r"\1N", text)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert text == (
        '{"model":"m","created_at":"T","message":{"role":"assistant","content":"Hel"},'
        '"done":false}\n'
        '{"model":"m","created_at":"T","message":{"role":"assistant","content":"lo"},'
        '"done":false}\n'
        '{"model":"m","created_at":"T","message":{"role":"assistant","content":""},'
        '"done":true,"done_reason":"stop","total_duration":N,"load_duration":N,'
        '"prompt_eval_count":7,"prompt_eval_cached_count":3,"prompt_eval_duration":2000000,'
        '"eval_count":2,"eval_duration":4000000}\n'
    )


async def test_answer_in_one_piece_has_the_whole_message(client: httpx.AsyncClient) -> None:
    whole = (await post(client, HI, stream=False)).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello"}
    assert "context" not in whole


async def test_history_with_tools_reaches_the_template(
    client: httpx.AsyncClient, engines: Any
) -> None:
    call = {"id": "call_1", "function": {"name": "f", "arguments": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x-extra": [1]}}}
    answer = await post(
        client,
        {"role": "SYSTEM", "content": "s"},
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_name": "f", "tool_call_id": "call_1"},
        HI,
        model="tools",
        tools=[tool],
    )
    assert answer.status_code == 200
    [request] = engines.only.generations
    prompt = prompt_of(request)
    assert '"parameters": {"x-extra": [1]}' in prompt
    assert prompt.endswith("<|tool|>42\n<|user|>hi\n<|assistant|>")


@pytest.mark.parametrize("properties", [{"a": {"type": ["string", "null"]}}, [], None])
async def test_tool_schemas_are_taken_as_they_come(
    client: httpx.AsyncClient, properties: object
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    answer = await post(client, HI, model="tools", tools=[{"function": function}])
    assert answer.status_code == 200


async def test_no_messages_load_and_unload(client: httpx.AsyncClient, engines: Any) -> None:
    loaded = (await post(client)).json()
    assert (loaded["done_reason"], loaded["message"]) == (
        "load",
        {"role": "assistant", "content": ""},
    )
    assert (await post(client, keep_alive=0)).json()["done_reason"] == "unload"
    assert (await client.get("/api/ps")).json() == {"models": []}
    assert engines.only.generations == []


REFUSED = [
    ({"model": ""}, 400, "model is required"),
    ({"model": "nope"}, 404, "model 'nope' not found"),
    ({"model": "bert"}, 400, '"bert" does not support chat'),
    ({"model": "bert", "messages": []}, 400, '"bert" does not support chat'),
    (
        {"tools": [{"function": {"name": "f"}}]},
        400,
        "registry.ollama.ai/library/m:latest does not support tools",
    ),
    ({"messages": [HI | {"images": ["%"]}]}, 400, "illegal base64 data"),
    ({"messages": [HI | {"images": ["AAAA"]}]}, 400, '"m" does not support images'),
    ({"messages": [{"role": "robot", "content": "?"}]}, 400, "unknown role 'robot'"),
    ({"think": True}, 400, '"m" does not support thinking'),
    ({"format": "json"}, 400, "structured output (format) is not supported yet"),
]


@pytest.mark.parametrize(("body", "status", "error"), REFUSED)
async def test_what_cannot_be_answered_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, error: str
) -> None:
    answer = await client.post("/api/chat", json={"model": "m", "messages": [HI]} | body)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(error)


async def test_empty_tools_are_no_tools(client: httpx.AsyncClient) -> None:
    assert (await post(client, HI, tools=[])).status_code == 200


class Narrow:
    """Plays an engine whose context holds n_ctx words, as the fake engine counts them."""

    def __init__(self, n_ctx: int, play: Any) -> None:
        self.n_ctx = n_ctx
        self._play = play

    def __call__(self, request: Generate) -> Any:
        n_prompt = len(prompt_of(request).split())
        if n_prompt < self.n_ctx:
            return self._play(request)
        message = f"prompt too long; exceeded max context length by {n_prompt - self.n_ctx} tokens"
        return [
            Failed(
                uid=request.uid,
                kind="PromptTooLong",
                status=400,
                message=message,
                n_prompt=n_prompt,
                n_ctx=self.n_ctx,
            )
        ]


def history(n_turns: int) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": "keep me"}]
    for i in range(n_turns):
        turns.append({"role": "user", "content": f"question {i} of many words"})
        turns.append({"role": "assistant", "content": f"answer {i}"})
    return [*turns, {"role": "user", "content": "last"}]


@pytest.mark.parametrize("n_turns", [1, 2, 9, 30])
async def test_long_history_loses_its_oldest_messages_and_no_more(
    client: httpx.AsyncClient, engines: Any, n_turns: int
) -> None:
    engines.play = Narrow(20, engines.play)
    answer = await post(client, *history(n_turns), stream=False)
    assert answer.json()["message"]["content"] == "Hello"
    sent = prompt_of(engines.only.generations[-1])
    assert sent.startswith("<|system|>keep me\n")
    assert sent.endswith("<|user|>last\n<|assistant|>")
    kept = sent.splitlines()[1:-1]
    every = [f"<|{turn['role']}|>{turn['content']}" for turn in history(n_turns)[1:]]
    dropped = every[: -len(kept)]
    assert every[-len(kept) :] == kept
    if dropped:
        assert len(sent.split()) + len(dropped[-1].split()) >= 20, "one more would have fitted"
    assert not engines.only.open


@pytest.mark.parametrize("stream", [True, False])
async def test_without_truncate_a_long_history_is_400_before_the_stream(
    client: httpx.AsyncClient, engines: Any, stream: bool
) -> None:
    engines.play = Narrow(20, engines.play)
    answer = await post(client, *history(9), truncate=False, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert re.match(r"prompt too long; exceeded max context length by \d+ tokens", error)
    assert len(engines.only.generations) == 1


async def test_a_last_message_that_is_too_long_alone_is_400(
    client: httpx.AsyncClient, engines: Any
) -> None:
    engines.play = Narrow(20, engines.play)
    long = {"role": "user", "content": "word " * 50}
    for messages in ([long], [HI, long]):
        answer = await post(client, *messages)
        assert answer.status_code == 400
        assert "prompt too long" in answer.json()["error"]
