"""A server on scripted engines: everything is real but the engine process and llama.cpp."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from headrace.config import Settings
from headrace.engine.client import EngineClient, RequestEvent, Stream
from headrace.engine.errors import EngineDied, EngineError
from headrace.engine.library import Library, Model
from headrace.engine.messages import (
    Accepted,
    Count,
    Counted,
    Done,
    DoneReason,
    Forecast,
    Generate,
    Load,
    Loaded,
    MoreMemory,
    Segment,
    Tiers,
    Timings,
    Token,
)
from headrace.server.app import create_app
from headrace.server.models import Models, PlanLoad

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
THINKING = PLAIN + "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"

Play = Callable[[Generate], Iterable[RequestEvent]]

FORECAST = Forecast(
    decode_tokens_per_s=2.5, ttft_s_per_1000_tokens=40.0, load_s=1.5, limit="disk",
    read_bytes_per_token=1000.0, expert_hit_rate=None, hit_rate_source=None, correction=0.9,
    unmeasured_types=(),
    more_memory=(
        MoreMemory(
            budget_bytes=11250, mode="full-resident", decode_tokens_per_s=7.0, limit="compute"
        ),
    ),
)  # fmt: skip


def text_of(prompt: tuple[Segment, ...]) -> str:
    return "".join(segment.text for segment in prompt)


class FakeEngine(EngineClient):
    """An engine whose play says what events a Generate is answered with; it counts words."""

    def __init__(self, load: Load, play: Play) -> None:
        super().__init__()
        self.load = load
        self.play = play
        self.n_ctx = load.n_ctx
        self.context_bytes = 1000
        self.loaded = Loaded(
            n_ctx=load.n_ctx,
            n_ctx_train=8192,
            n_slots=load.n_slots,
            n_vocab=100,
            control_tokens=("<|user|>", "<|assistant|>", "<|system|>"),
            bos="<s>",
            eos="</s>",
            adds_bos=False,
            weights_bytes=5000,
            context_bytes=1000,
            load_ns=1,
            tiers=Tiers(
                mode="dense-ffn-streaming", budget_bytes=9000, resident_bytes=4000,
                stream_bytes=500, streamed_bytes=1000,
            ),
            forecast=FORECAST,
        )  # fmt: skip
        self.generations: list[Generate] = []
        self.counts: list[Count] = []
        self.open: dict[int, Stream] = {}
        self.cancelled: list[int] = []
        self.has_died = False
        self.is_closed = False

    @property
    def is_alive(self) -> bool:
        return not self.has_died and not self.is_closed

    @property
    def n_open(self) -> int:
        return len(self.open)

    def submit(self, command: Generate | Count) -> Stream:
        stream = self.open[command.uid] = Stream(self, command.uid)
        if isinstance(command, Count):
            self.counts.append(command)
            n_tokens = tuple(len(text_of(prompt).split()) for prompt in command.prompts)
            self.put(Counted(uid=command.uid, n_tokens=n_tokens))
        else:
            self.generations.append(command)
            for event in self.play(command):
                self.put(event)
        return stream

    def put(self, event: RequestEvent) -> None:
        """Send an event of an open request, as the process would."""
        stream = self.open[event.uid]
        if isinstance(event, Done | Counted) or type(event).__name__ == "Failed":
            del self.open[event.uid]
        stream.put(event)

    def forget(self, uid: int) -> None:
        if self.open.pop(uid, None) is not None:
            self.cancelled.append(uid)

    def die(self) -> None:
        """End as a process does that was killed."""
        self.has_died = True
        for stream in self.open.values():
            stream.put(EngineDied("the engine process ended by SIGKILL"))
        self.open.clear()

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed = True


def done(uid: int, n_generated: int, reason: DoneReason = "stop", **more: Any) -> Done:
    timings = Timings(
        n_prompt=7,
        n_cached=3,
        n_generated=n_generated,
        queue_ns=0,
        prefill_ns=2_000_000,
        decode_ns=4_000_000,
    )
    return Done(uid=uid, reason=reason, timings=timings, **more)


def says(*pieces: str, **more: Any) -> Play:
    """Return a play that answers with pieces and a Done with more."""

    def play(request: Generate) -> list[RequestEvent]:
        uid = request.uid
        tokens = [Token(uid=uid, text=piece) for piece in pieces]
        return [Accepted(uid=uid, n_prompt=7), *tokens, done(uid, len(pieces), **more)]

    return play


class Engines:
    """Starts fake engines; gate holds back loads, failure makes them fail."""

    def __init__(self) -> None:
        self.started: list[FakeEngine] = []
        self.play: Play = says("Hel", "lo")
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: EngineError | None = None
        self.n_starting = 0
        self.n_cancelled_loads = 0

    async def start(self, load: Load) -> EngineClient:
        self.n_starting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.n_cancelled_loads += 1
            raise
        finally:
            self.n_starting -= 1
        if self.failure is not None:
            raise self.failure
        engine = FakeEngine(load, lambda request: self.play(request))
        self.started.append(engine)
        return engine

    @property
    def only(self) -> FakeEngine:
        [engine] = self.started
        return engine


def plan_load(model: Model, settings: Settings) -> Load:
    return Load(
        path=str(model.path),
        name=str(model.name),
        n_ctx=settings.context or 4096,
        n_slots=settings.parallel or 1,
        n_batch=512,
        n_threads=1,
        n_threads_batch=1,
    )


def write_gguf(path: Path, template: str | None, *, is_embedding: bool = False) -> Path:
    """Write the smallest file that passes for a model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(8192)
    writer.add_embedding_length(8)
    writer.add_name("secret name")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    if template is not None:
        writer.add_chat_template(template)
    if is_embedding:
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# importlib mode: a test file can't import this one, so what it needs is handed over.
@pytest.fixture(name="says")
def give_says() -> Callable[..., Play]:
    return says


@pytest.fixture(name="done")
def give_done() -> Callable[..., Done]:
    return done


@pytest.fixture
def plan() -> PlanLoad:
    return plan_load


@pytest.fixture
def settings() -> Settings:
    return Settings(max_queue=2, parallel=1)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """Models: m (no tools), tools, thinker, bert (embeddings only)."""
    return Library(
        [
            write_gguf(tmp_path / "m.gguf", PLAIN),
            write_gguf(tmp_path / "tools.gguf", WITH_TOOLS),
            write_gguf(tmp_path / "thinker.gguf", THINKING),
            write_gguf(tmp_path / "bert.gguf", None, is_embedding=True),
        ]
    )


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", PLAIN)


@pytest.fixture
async def engines(anyio_backend: str) -> Engines:
    return Engines()


@pytest.fixture
async def models(library: Library, settings: Settings, engines: Engines) -> AsyncIterator[Models]:
    models = Models(library, settings, plan_load, engines.start)
    yield models
    engines.gate.set()
    await models.close()
    assert all(engine.is_closed for engine in engines.started)


@pytest.fixture
def app(settings: Settings, models: Models) -> FastAPI:
    return create_app(settings, models)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


class Call:
    """One request through hand-made ASGI: what was sent so far, and a client that can leave."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.n_writes = 0
        self.is_complete = False
        self._raw = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._changed = asyncio.Condition()
        self._is_read = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._raw, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.body += message["body"]
            self.n_writes += 1
            self.is_complete = not message.get("more_body", False)
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until is_so() holds; looked at after each message of the application."""
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(is_so)

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.decode().splitlines()]


@pytest.fixture
def call(app: FastAPI) -> Callable[[str, dict[str, Any]], Call]:
    """Start a request: call(path, body)."""
    return lambda path, body: Call(app, path, body)
