"""Paths, methods and the shape of errors."""

from __future__ import annotations

import httpx
import pytest

pytestmark = pytest.mark.anyio


async def test_root_says_what_tools_probe_for(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


async def test_version_has_exactly_one_key(client: httpx.AsyncClient) -> None:
    answer = await client.get("/api/version")
    assert list(answer.json()) == ["version"]
    assert answer.headers["content-type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags"])
async def test_probed_paths_answer_head(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.head(path)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api/show", "POST"),
        ("GET", "/api/generate", "POST"),
        ("POST", "/api/ps", "GET"),
    ],
)
async def test_wrong_method_is_405_and_names_the_right_one(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.text == "405 method not allowed"
    assert answer.headers["content-type"].startswith("text/plain")


async def test_head_is_not_answered_elsewhere(client: httpx.AsyncClient) -> None:
    answer = await client.head("/api/ps")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/nope", "/docs", "/openapi.json", "/api", "//"])
async def test_unknown_path_is_a_plain_404(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get("http://localhost" + path)
    assert (answer.status_code, answer.text) == (404, "404 page not found")
    assert answer.headers["content-type"].startswith("text/plain")


async def test_a_slash_too_many_leads_to_the_path_without_it(client: httpx.AsyncClient) -> None:
    got = await client.get("/api/tags/?a=1")
    posted = await client.post("/api/generate/", content="{}")
    assert (got.status_code, got.headers["location"]) == (301, "/api/tags?a=1")
    assert (posted.status_code, posted.headers["location"]) == (307, "/api/generate")


POSTS = ["/api/generate", "/api/chat", "/api/show"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", [b"", b" ", b"\xef\xbb\xbf"])
async def test_missing_body_is_told(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    answer = await client.post(path, content=body)
    assert (answer.status_code, answer.json()) == (400, {"error": "missing request body"})


MALFORMED = {
    "unquoted key": b'{model:"m"}',
    "array": b"[]",
    "string": b'"x"',
    "unfinished": b'{"model":"m"',
    "lone surrogate": b'{"model":"m","prompt":"\\ud83d"}',
    "gbk": b'{"model":"m","prompt":"\xc4\xe3\xba\xc3"}',
    "gbk in a key": b'{"\xc4\xe3":1}',
    "deep": b'{"model":"m","format":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "5000 digits": b'{"model":"m","options":{"num_predict":' + b"9" * 5000 + b"}}",
    "nan": b'{"model":"m","options":{"temperature":NaN}}',
    "infinity": b'{"model":"m","options":{"temperature":1e999}}',
    "model is a number": b'{"model":1}',
    "stream is a number": b'{"model":"m","stream":1}',
    "options is a list": b'{"model":"m","options":[]}',
    "context has text": b'{"model":"m","context":["a"]}',
    "context is out of range": b'{"model":"m","context":[4294967296]}',
    "messages is text": b'{"model":"m","messages":"x"}',
    "role is a number": b'{"model":"m","messages":[{"role":7}]}',
    "content is a list": b'{"model":"m","messages":[{"role":"user","content":[]}]}',
    "arguments is text": b'{"model":"m","messages":[{"role":"assistant","tool_calls":'
    b'[{"function":{"name":"f","arguments":"{}"}}]}]}',
    "tool without function": b'{"model":"m","tools":[{"type":"function"}]}',
}
ONLY_CHAT = ("messages", "role", "content is a list", "arguments", "tool")
ONLY_GENERATE = ("context",)


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_body_is_400_with_a_text(client: httpx.AsyncClient, name: str) -> None:
    path = "/api/chat" if name.startswith(ONLY_CHAT) else "/api/generate"
    answer = await client.post(path, content=MALFORMED[name])
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "content_type",
    ["application/x-www-form-urlencoded", "text/plain", "application/json;charset=gbk", "?", ""],
)
async def test_content_type_plays_no_part(client: httpx.AsyncClient, content_type: str) -> None:
    body = b'{"model":"m","prompt":"x","stream":false}'
    answer = await client.post(
        "/api/generate", content=body, headers={"content-type": content_type}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"model":"m","prompt":"x"}',
        b'{"MODEL":"m","Prompt":"x"}',
        b'{"model":"nope","model":"m","prompt":"x"}',
        b'{"model":"m","prompt":"x","nosuch":[1],"num_predict":1,"system":null,"options":null}',
        b'{"model":"m","prompt":"a\\u0000b","options":{"temperature":null,"nosuch":1}}',
    ],
)
async def test_lenient_bodies_are_answered(client: httpx.AsyncClient, body: bytes) -> None:
    assert (await client.post("/api/generate", content=body)).status_code == 200


async def test_authorization_is_ignored(client: httpx.AsyncClient) -> None:
    answer = await client.get("/api/tags", headers={"authorization": "Bearer x"})
    assert answer.status_code == 200
