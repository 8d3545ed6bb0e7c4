"""/api/generate: what the engine is asked for and what the client gets."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import httpx
import pytest

from headrace.engine.errors import ModelUnusable
from headrace.engine.messages import (
    Accepted,
    Done,
    Failed,
    Generate,
    Logprob,
    Segment,
    Timings,
    Token,
)

pytestmark = pytest.mark.anyio

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/api/generate", json={"model": "m", **body})


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.content.splitlines()]


def golden(answer: httpx.Response) -> str:
    """Return the body with what changes from run to run taken out."""
    text = STAMP.sub("T", answer.text)
    return re.sub(r'("(?:total|load)_duration":)[1-9]\d*', r"\1N", text)


async def test_stream_is_one_record_a_line_and_a_last_one_without_text(
    client: httpx.AsyncClient,
) -> None:
    answer = await post(client, prompt="x")
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert golden(answer) == (
        '{"model":"m","created_at":"T","response":"Hel","done":false}\n'
        '{"model":"m","created_at":"T","response":"lo","done":false}\n'
        '{"model":"m","created_at":"T","response":"","done":true,"done_reason":"stop",'
        '"total_duration":N,"load_duration":N,"prompt_eval_count":7,'
        '"prompt_eval_cached_count":3,"prompt_eval_duration":2000000,"eval_count":2,'
        '"eval_duration":4000000}\n'
    )


async def test_answer_in_one_piece_has_the_same_text(client: httpx.AsyncClient) -> None:
    answer = await post(client, prompt="x", stream=False)
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert golden(answer) == (
        '{"model":"m","created_at":"T","response":"Hello","done":true,"done_reason":"stop",'
        '"total_duration":N,"load_duration":N,"prompt_eval_count":7,'
        '"prompt_eval_cached_count":3,"prompt_eval_duration":2000000,"eval_count":2,'
        '"eval_duration":4000000}'
    )


async def test_model_comes_back_as_it_was_written(client: httpx.AsyncClient) -> None:
    answer = await post(client, model=" library/M:Latest", prompt="x")
    assert {line["model"] for line in lines(answer)} == {" library/M:Latest"}


async def test_text_held_back_comes_before_the_last_record(
    client: httpx.AsyncClient, engines: Any, says: Any
) -> None:
    engines.play = says("a", text="🧑‍🚀", reason="length")
    answer = lines(await post(client, prompt="x"))
    assert [line["response"] for line in answer] == ["a", "🧑‍🚀", ""]
    assert answer[-1]["done_reason"] == "length"
    whole = (await post(client, prompt="x", stream=False)).json()
    assert whole["response"] == "a🧑‍🚀"


async def test_zeros_are_left_out_of_the_last_record(
    client: httpx.AsyncClient, engines: Any
) -> None:
    def play(request: Generate) -> list[Any]:
        timings = Timings(
            n_prompt=1, n_cached=0, n_generated=0, queue_ns=0, prefill_ns=5, decode_ns=0
        )
        return [
            Accepted(uid=request.uid, n_prompt=1),
            Done(uid=request.uid, reason="length", timings=timings),
        ]

    engines.play = play
    answer = await post(client, prompt="x", options={"num_predict": 0})
    assert answer.headers["content-type"] == "application/x-ndjson"
    [last] = lines(answer)
    assert last["response"] == ""
    assert not {"eval_count", "eval_duration", "prompt_eval_cached_count", "context"} & set(last)
    assert engines.only.generations[0].n_predict == 0


async def test_prompt_is_a_turn_of_the_chat_template(
    client: httpx.AsyncClient, engines: Any
) -> None:
    await post(client, prompt="hi <|system|>", system="Be brief.")
    prompt = engines.only.generations[0].prompt
    assert prompt == (
        Segment("<|system|>Be brief.\n<|user|>hi ", True),
        Segment("<|system|>", False),
        Segment("\n<|assistant|>", True),
    )


async def test_raw_prompt_goes_as_it_is_and_has_no_context(
    client: httpx.AsyncClient, engines: Any
) -> None:
    await post(client, prompt="<s>[INST]x", raw=True)
    [request] = engines.only.generations
    assert request.prompt == (Segment("<s>[INST]x", True),)
    assert not request.wants_context


async def test_context_goes_before_the_prompt_and_comes_back(
    client: httpx.AsyncClient, engines: Any, says: Any
) -> None:
    engines.play = says("a", context=(1, 2, 3))
    last = lines(await post(client, prompt="x", context=[8, 9]))[-1]
    [request] = engines.only.generations
    assert (request.prefix_tokens, request.wants_context) == ((8, 9), True)
    assert last["context"] == [1, 2, 3]


async def test_options_truncate_and_shift_reach_the_engine(
    client: httpx.AsyncClient, engines: Any
) -> None:
    await post(client, prompt="x", options={"num_ctx": 99, "stop": "s"}, shift=False)
    await post(client, prompt="x", truncate=False)
    first, second = engines.only.generations
    assert (first.n_ctx, first.stop, first.truncates, first.shifts) == (99, ("s",), True, False)
    assert (second.n_ctx, second.truncates, second.shifts) == (0, False, True)


async def test_logprobs_are_entries_with_bytes(
    client: httpx.AsyncClient, engines: Any, done: Any
) -> None:
    first = Logprob(b"\xf0\x9f", -0.5, ((b"\xf0\x9f", -0.5), (b"x", float("-inf"))))
    second = Logprob(b"\x98\x8a", -0.25)

    def play(request: Generate) -> list[Any]:
        uid = request.uid
        return [
            Accepted(uid=uid, n_prompt=1),
            Token(uid=uid, text="😊", logprobs=(first, second)),
            done(uid, 2, logprobs=(Logprob(b"!", 0.0),)),
        ]

    engines.play = play
    chunk, rest, last = lines(await post(client, prompt="x", logprobs=True, top_logprobs=2))
    assert engines.only.generations[0].n_top_logprobs == 2
    assert [entry["bytes"] for entry in chunk["logprobs"]] == [[0xF0, 0x9F], [0x98, 0x8A]]
    assert chunk["logprobs"][0]["top_logprobs"][1]["logprob"] == -9999.0
    assert "top_logprobs" not in chunk["logprobs"][1]
    assert rest["response"] == ""
    assert rest["logprobs"] == [{"token": "!", "logprob": 0.0, "bytes": [33]}]
    assert "logprobs" not in last
    whole = (await post(client, prompt="x", logprobs=True, stream=False)).json()
    assert len(whole["logprobs"]) == 3
    assert engines.only.generations[1].n_top_logprobs == 0


async def test_no_logprobs_unless_asked_for(client: httpx.AsyncClient, engines: Any) -> None:
    await post(client, prompt="x", top_logprobs=5)
    assert engines.only.generations[0].n_top_logprobs == -1


async def test_empty_prompt_loads_with_one_object(client: httpx.AsyncClient, engines: Any) -> None:
    answer = await post(client)
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert golden(answer) == (
        '{"model":"m","created_at":"T","response":"","done":true,"done_reason":"load"}'
    )
    assert engines.only.generations == []


async def test_empty_prompt_and_no_keep_alive_unload(
    client: httpx.AsyncClient, engines: Any
) -> None:
    assert (await post(client, keep_alive=0)).json()["done_reason"] == "unload"
    assert engines.started == []
    await post(client, prompt="x")
    assert (await post(client, keep_alive="0")).json()["done_reason"] == "unload"
    assert (await client.get("/api/ps")).json() == {"models": []}


async def test_debug_shows_the_prompt_and_generates_nothing(
    client: httpx.AsyncClient, engines: Any
) -> None:
    answer = await post(client, prompt="hi", _debug_render_only=True)
    assert golden(answer) == (
        '{"model":"m","created_at":"T","response":"","done":false,"_debug_info":'
        '{"rendered_template":"<|user|>hi\\n<|assistant|>","image_count":0}}'
    )
    assert engines.only.generations == []


PIXEL = base64.b64encode(b"\x89PNG").decode()
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": ""}, 404, "model '' not found"),
    ({"model": "nope:1b"}, 404, "model 'nope:1b' not found"),
    ({"model": "m:2b", "options": {"seed": "x"}}, 404, "model 'm:2b' not found"),
    ({"model": "nope", "top_logprobs": 21}, 400, "top_logprobs must be between 0 and 20"),
    ({"top_logprobs": -1}, 400, "top_logprobs must be between 0 and 20"),
    ({"model": "a/b/c/d/e"}, 400, "invalid model name"),
    ({"model": "bert"}, 400, '"bert" does not support generate'),
    ({"think": True}, 400, '"m" does not support thinking'),
    ({"think": "low"}, 400, '"m" does not support thinking'),
    ({"think": "deep"}, 400, 'invalid think value: "deep"'),
    ({"think": 1}, 400, "think must be a boolean or string"),
    ({"raw": True, "system": "s"}, 400, "raw mode does not support template, system, or context"),
    ({"raw": True, "context": [1]}, 400, "raw mode does not support template, system, or context"),
    ({"raw": True, "template": "t"}, 400, "raw mode does not support template, system, or context"),
    ({"template": "{{ .Prompt }}"}, 400, "per-request Go templates are not supported"),
    ({"suffix": "s"}, 400, "registry.ollama.ai/library/m:latest does not support insert"),
    ({"images": ["not base64!!"]}, 400, "illegal base64 data"),
    ({"images": [PIXEL]}, 400, '"m" does not support images'),
    ({"options": {"seed": "x"}}, 400, 'option "seed" must be of type integer'),
    ({"format": "json"}, 400, "structured output (format) is not supported yet"),
    ({"format": {"type": "object"}}, 400, "structured output (format) is not supported yet"),
    (
        {"format": "yaml"},
        400,
        'invalid format: "\\"yaml\\""; expected "json" or a valid JSON Schema object',
    ),
    ({"format": 1}, 400, 'invalid format: "1"; expected "json" or a valid JSON Schema object'),
]


@pytest.mark.parametrize(("body", "status", "error"), REFUSED)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_cannot_be_answered_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, error: str, stream: bool
) -> None:
    answer = await post(client, **({"prompt": "x", "stream": stream} | body))
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(error)


@pytest.mark.parametrize("format", [None, ""])
async def test_empty_format_is_none(client: httpx.AsyncClient, format: object) -> None:
    assert (await post(client, prompt="x", format=format)).status_code == 200


async def test_not_thinking_is_fine_everywhere(client: httpx.AsyncClient) -> None:
    assert (await post(client, prompt="x", think=False)).status_code == 200


@pytest.mark.parametrize(
    ("think", "tail"), [(None, "<think>"), ("high", "<think>"), (False, "<think></think>")]
)
async def test_thinking_model_thinks_unless_told_not_to(
    client: httpx.AsyncClient, think: object, tail: str
) -> None:
    answer = await post(client, model="thinker", prompt="x", think=think, _debug_render_only=True)
    rendered = answer.json()["_debug_info"]["rendered_template"]
    assert rendered == "<|user|>x\n<|assistant|>" + tail


async def test_refusal_of_the_engine_has_its_own_status(
    client: httpx.AsyncClient, engines: Any
) -> None:
    engines.play = lambda request: [
        Failed(uid=request.uid, kind="InvalidRequest", status=400, message="no tokens")
    ]
    for stream in (True, False):
        answer = await post(client, prompt="x", stream=stream)
        assert (answer.status_code, answer.json()) == (400, {"error": "no tokens"})


async def test_failure_of_the_load_is_told_and_the_next_request_tries_again(
    client: httpx.AsyncClient, engines: Any
) -> None:
    engines.failure = ModelUnusable("wrong magic")
    answer = await post(client, prompt="x")
    assert (answer.status_code, answer.json()) == (500, {"error": "wrong magic"})
    assert (await client.get("/api/ps")).json() == {"models": []}
    engines.failure = None
    assert (await post(client, prompt="x")).status_code == 200
