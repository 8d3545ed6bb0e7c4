"""The official Python client against a real server process, on two real models."""

from __future__ import annotations

import time
from collections.abc import Iterator

import ollama
import pytest
from serving import Server

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


@pytest.fixture
def model(server: Server) -> str:
    return server.names()[0]


def test_list_names_the_model(client: ollama.Client, model: str) -> None:
    (entry,) = client.list().models
    assert entry.model == model
    assert entry.size is not None and entry.size > 50_000_000
    assert entry.digest is not None and len(entry.digest) == 64
    assert entry.details is not None and entry.details.format == "gguf"


def test_show_has_what_the_client_needs(client: ollama.Client, model: str) -> None:
    shown = client.show(model)
    assert shown.modelinfo is not None
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] > 0
    assert shown.capabilities is not None and "completion" in shown.capabilities


def test_generate_streams_what_it_says_whole(client: ollama.Client, model: str) -> None:
    whole = client.generate(model, "The sea is", options=GREEDY)
    parts = list(client.generate(model, "The sea is", options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == whole.response
    assert len(parts) > 3
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    assert whole.prompt_eval_count is not None and whole.prompt_eval_count > 0
    assert whole.total_duration is not None and whole.total_duration > 0
    assert whole.load_duration is not None and whole.load_duration > 0
    assert whole.context


def test_chat_streams_what_it_says_whole(client: ollama.Client, model: str) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    whole = client.chat(model, messages, options=GREEDY)
    parts = list(client.chat(model, messages, options=GREEDY, stream=True))
    assert whole.message.role == "assistant"
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert parts[-1].done_reason == whole.done_reason


def test_context_continues_a_generation(client: ollama.Client, model: str) -> None:
    first = client.generate(model, "The sea is", options=GREEDY)
    second = client.generate(model, "And then?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count is not None and first.prompt_eval_count is not None
    assert second.prompt_eval_count > first.prompt_eval_count


def test_ps_lists_the_loaded_model(client: ollama.Client, model: str) -> None:
    client.generate(model, "hi", options={"num_predict": 1})
    (entry,) = client.ps().models
    assert entry.model == model
    assert entry.size is not None and entry.size > 0
    assert entry.context_length is not None and entry.context_length > 0


def test_unknown_model_is_a_404(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'nope' not found") as caught:
        client.generate("nope", "hi")
    assert caught.value.status_code == 404


def test_wrong_option_type_is_named(client: ollama.Client, model: str) -> None:
    with pytest.raises(ollama.ResponseError, match='option "num_predict" must be of type integer'):
        client.generate(model, "hi", options={"num_predict": "5"})


def test_tools_are_refused_by_a_model_without_them(client: ollama.Client, model: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        client.chat(model, [{"role": "user", "content": "hi"}], tools=[tool])


def test_keep_alive_moves_the_expiry_and_zero_unloads(client: ollama.Client, model: str) -> None:
    client.generate(model, "hi", options={"num_predict": 1}, keep_alive="1h")
    (entry,) = client.ps().models
    assert entry.expires_at is not None
    assert 3000 < entry.expires_at.timestamp() - time.time() <= 3600
    assert client.generate(model, keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    assert client.generate(model).done_reason == "load"
    assert len(client.ps().models) == 1
