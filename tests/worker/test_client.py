"""A real engine process behind its client: requests, cancelling, every way to end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until

from headrace.engine.client import EngineClient, Stream
from headrace.engine.errors import EngineDied, ModelUnusable
from headrace.engine.frames import frame, read_frames
from headrace.engine.messages import (
    Accepted,
    Cancel,
    Command,
    Count,
    Counted,
    Done,
    Event,
    Failed,
    Generate,
    Load,
    Loaded,
    SamplingParams,
    Segment,
    Status,
    Token,
    decode_events,
    encode,
)

GREEDY = SamplingParams(temperature=0)
# Ten contexts' worth: hot enough not to repeat itself, and never among the best is EOS.
ENDLESS = {"n_predict": -1, "sampling": SamplingParams(temperature=3, top_k=10)}
LONG = "the sea is wide and old ships cross it " * 30


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No process and no descriptor outlives a test, and no exception gets lost in asyncio."""
    n_fds = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    records = caplog.get_records("call") + caplog.get_records("teardown")
    assert [record.getMessage() for record in records if record.name == "asyncio"] == []
    assert psutil.Process().children(recursive=True) == []
    assert len(os.listdir("/proc/self/fd")) == n_fds


def load_of(path: Path, **changes: Any) -> Load:
    defaults: dict[str, Any] = {
        "name": path.stem, "n_ctx": 2048, "n_slots": 2, "n_batch": 512,
        "n_threads": 1, "n_threads_batch": 1, "log_level": "warning",
    }  # fmt: skip
    return Load(path=str(path), **defaults | changes)


@asynccontextmanager
async def running(path: Path, **changes: Any) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(load_of(path, **changes))
    try:
        yield client
    finally:
        await client.close()


def generate(client: EngineClient, text: str, **options: Any) -> Stream:
    options = {"sampling": GREEDY, "n_predict": 20, **options}
    return client.submit(
        Generate(uid=client.next_uid(), prompt=(Segment(text, True),), **options)
    )  # fmt: skip


async def until(stream: Stream, kind: type[Event]) -> Any:
    """Return the next event of a kind; what comes before it is skipped."""
    while not isinstance(event := await stream.next(), kind):
        assert not isinstance(event, Done | Failed), event
    return event


async def text_of(stream: Stream) -> str:
    text = ""
    while True:
        event = await stream.next()
        if isinstance(event, Token):
            text += event.text
        elif isinstance(event, Done):
            return text + event.text


def run(test: Awaitable[None]) -> None:
    async def with_deadline() -> None:
        await asyncio.wait_for(test, 60)

    asyncio.run(with_deadline())


# ---- requests ----


def test_events_of_a_request_come_in_order(smollm2_path: Path) -> None:
    async def test() -> None:
        async with running(smollm2_path) as client:
            stream = generate(client, "One, two, three,")
            events = [await stream.next()]
            while not isinstance(events[-1], Done):
                events.append(await stream.next())
            first, *tokens, last = events
            assert isinstance(first, Accepted) and isinstance(last, Done)
            assert tokens and all(isinstance(event, Token) for event in tokens)
            assert last.timings.n_prompt == first.n_prompt
            assert last.timings.n_generated == 20
            assert stream.next_nowait() is None
            assert client.n_open == 0

    run(test())


def test_how_the_engine_is_doing_is_known_when_an_answer_ends(smollm2_path: Path) -> None:
    async def test() -> None:
        async with running(smollm2_path) as client:
            await text_of(generate(client, "The sea is wide", n_predict=10))
            assert client.status == Status()
            await text_of(generate(client, "Once upon a time", n_predict=70, ignores_end=True))
            status = client.status
            assert status.measured_tokens_per_s is not None and status.measured_tokens_per_s > 0
            assert status.parked_bytes > 0  # the first prompt and its answer
            assert status.cache_share is None  # all weights are resident

    run(test())


def test_more_requests_than_slots_all_get_their_own_answer(smollm2_path: Path) -> None:
    async def test() -> None:
        async with running(smollm2_path, n_slots=2) as client:
            prompts = [f"Count: {i}, {i + 1}, {i + 2}," for i in range(5)]
            alone = [await text_of(generate(client, prompt, n_predict=10)) for prompt in prompts]
            together = await asyncio.gather(
                *(text_of(generate(client, prompt, n_predict=10)) for prompt in prompts)
            )
            assert together == alone
            assert len(set(alone)) == 5

    run(test())


def test_prompts_are_counted_as_they_are_tokenised(smollm2_path: Path) -> None:
    async def test() -> None:
        async with running(smollm2_path) as client:
            texts = ["", "One, two", "<|im_start|>user\nHello"]
            stream = client.submit(
                Count(
                    uid=client.next_uid(),
                    prompts=tuple((Segment(text, True),) for text in texts),
                )
            )
            counted = await stream.next()
            assert isinstance(counted, Counted)
            accepted = [
                await until(generate(client, text, n_predict=1), Accepted) for text in texts[1:]
            ]
            assert list(counted.n_tokens) == [0, *(event.n_prompt for event in accepted)]

    run(test())


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"n_ctx": 64}, "PromptTooLong"),
        ({"prefix_tokens": (1 << 30,)}, "InvalidRequest"),
    ],
)
def test_a_request_that_can_not_be_run_fails_alone(
    options: dict[str, Any], kind: str, tiny_llama_path: Path
) -> None:
    async def test() -> None:
        async with running(tiny_llama_path) as client:
            failed = await generate(client, LONG, **options).next()
            assert isinstance(failed, Failed) and failed.kind == kind
            assert failed.status == 400
            assert client.n_open == 0
            assert await text_of(generate(client, "abc"))

    run(test())


def test_a_request_may_change_the_context(tiny_llama_path: Path) -> None:
    async def test() -> None:
        async with running(tiny_llama_path) as client:
            n_bytes = client.context_bytes
            await text_of(generate(client, "abc", n_ctx=1024))
            assert client.n_ctx == 1024
            assert client.context_bytes == n_bytes // 2

    run(test())


# ---- cancelling ----


async def begin_queued(client: EngineClient) -> Stream:
    await until(generate(client, "abc", n_predict=300), Token)
    return generate(client, LONG, **ENDLESS)


async def begin_prefilling(client: EngineClient) -> Stream:
    stream = generate(client, LONG * 6, **ENDLESS)
    await until(stream, Accepted)
    return stream


async def begin_decoding(client: EngineClient) -> Stream:
    stream = generate(client, "abc", **ENDLESS)
    await until(stream, Token)
    return stream


@pytest.mark.parametrize("begin", [begin_queued, begin_prefilling, begin_decoding])
def test_a_cancelled_request_gives_its_slot_to_the_next(
    begin: Callable[[EngineClient], Awaitable[Stream]], tiny_llama_path: Path
) -> None:
    async def test() -> None:
        # 80,000 tokens would take half a minute.
        async with running(tiny_llama_path, n_slots=1, n_ctx=8192) as client:
            expected = await text_of(generate(client, "xyz"))
            stream = await begin(client)
            n_open = client.n_open
            stream.cancel()
            stream.cancel()
            assert client.n_open == n_open - 1
            next_one = text_of(generate(client, "xyz"))
            assert await asyncio.wait_for(next_one, 5) == expected

    run(test())


def test_a_request_cancelled_while_it_is_tokenised_never_comes_up(smollm2_path: Path) -> None:
    async def test() -> None:
        async with running(smollm2_path, n_slots=1) as client:
            for _ in range(4):  # more than there are threads
                generate(client, LONG * 100, n_predict=-1, truncates=True).cancel()
            # One that was not cancelled would keep the only slot for minutes.
            next_one = text_of(generate(client, "One, two", n_predict=5))
            assert await asyncio.wait_for(next_one, 10)
            assert client.n_open == 0

    run(test())


# ---- how it ends ----


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_a_dead_engine_ends_its_requests_with_how_it_died(
    number: signal.Signals, tiny_llama_path: Path
) -> None:
    async def test() -> None:
        client = await EngineClient.start(load_of(tiny_llama_path))
        streams = [generate(client, "abc", **ENDLESS) for _ in range(3)]
        await until(streams[0], Token)
        os.kill(client.pid, number)
        for stream in streams:
            with pytest.raises(EngineDied, match=number.name):
                await until(stream, Counted)  # what came before it is still handed out
            with pytest.raises(EngineDied):
                await stream.next()
        assert (client.is_alive, client.n_open) == (False, 0)
        with pytest.raises(EngineDied):
            await generate(client, "abc").next()
        await client.close()

    run(test())


def test_closing_ends_open_requests_and_may_be_done_twice(tiny_llama_path: Path) -> None:
    async def test() -> None:
        client = await EngineClient.start(load_of(tiny_llama_path))
        stream = generate(client, "abc", **ENDLESS)
        await until(stream, Token)
        started = time.monotonic()
        await client.close()
        assert time.monotonic() - started < 3
        assert not psutil.pid_exists(client.pid)
        with pytest.raises(EngineDied):
            await until(stream, Counted)
        await client.close()

    run(test())


def test_an_interrupt_is_for_the_server_alone(tiny_llama_path: Path) -> None:
    async def test() -> None:
        async with running(tiny_llama_path) as client:
            os.kill(client.pid, signal.SIGINT)
            assert await text_of(generate(client, "abc"))

    run(test())


# ---- models that can't be loaded ----


def damaged(kind: str, model: Path, folder: Path) -> Path:
    path = folder / "bad.gguf"
    if kind == "text":
        path.write_bytes(b"hello\n" * 100)
    elif kind == "header":
        path.write_bytes(model.read_bytes()[:1000])
    elif kind == "tensors":
        path.write_bytes(model.read_bytes()[:-100_000])
    return path


@pytest.mark.parametrize("kind", ["missing", "text", "header", "tensors"])
def test_a_model_that_can_not_be_loaded_says_why_and_leaves_no_process(
    kind: str, tiny_llama_path: Path, tmp_path: Path
) -> None:
    path = damaged(kind, tiny_llama_path, tmp_path)
    with pytest.raises(ModelUnusable, match=r"bad\.gguf"):
        asyncio.run(EngineClient.start(load_of(path)))


def test_a_model_without_what_its_architecture_needs_is_refused(
    tiny_llama_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(tiny_llama_path.read_bytes().replace(b"blk.1.attn_q", b"blk.1.attn_x"))
    with pytest.raises(ModelUnusable, match=r"bad\.gguf: .*attn_q"):
        asyncio.run(EngineClient.start(load_of(path)))


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.2, 0.5, 0.8])
def test_a_start_that_is_cancelled_leaves_no_process(delay_s: float, smollm2_path: Path) -> None:
    async def test() -> None:
        starting = asyncio.create_task(EngineClient.start(load_of(smollm2_path)))
        await asyncio.sleep(delay_s)
        starting.cancel()
        try:
            client = await starting
        except asyncio.CancelledError:
            return
        await client.close()  # it was ready before

    run(test())


def test_many_starts_leave_no_descriptor_and_no_thread(tiny_llama_path: Path) -> None:
    async def test() -> None:
        for _ in range(4):
            async with running(tiny_llama_path) as client:
                await text_of(generate(client, "abc", n_predict=2))

    process = psutil.Process()
    before = process.num_threads()
    run(test())
    # asyncio's thread that waits for a child is not joined: it may still be on its way out.
    wait_until(lambda: process.num_threads() <= before, "back to the threads of before")


# ---- the worker alone ----


class Worker:
    """An engine process without a client; its socket is ours."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace.engine.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.DEVNULL,
            )
        self.frames = read_frames(self.socket)

    def send(self, command: Command) -> None:
        self.socket.sendall(frame(encode(command)))

    def events(self) -> list[Event]:
        return decode_events.decode(next(self.frames))

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
            self.socket.close()


@pytest.fixture
def worker(nothing_is_left: None, tiny_llama_path: Path) -> Worker:
    started = Worker()
    started.send(load_of(tiny_llama_path))
    (loaded,) = started.events()
    assert isinstance(loaded, Loaded)
    return started


def test_an_idle_worker_ends_when_its_server_is_gone(worker: Worker) -> None:
    worker.socket.close()
    assert worker.wait(3) == 0


def test_a_busy_worker_ends_when_its_server_is_gone(worker: Worker) -> None:
    for uid in range(3):
        worker.send(
            Generate(uid=uid, prompt=(Segment("abc", True),), sampling=GREEDY, n_predict=-1)
        )
    worker.events()
    worker.socket.close()
    assert worker.wait(3) == 0


def test_a_worker_whose_server_reads_nothing_ends_with_it(worker: Worker) -> None:
    for uid in range(300):  # more events than a socket holds
        worker.send(
            Generate(
                uid=uid, prompt=(Segment("abc", True),), sampling=GREEDY, n_predict=300,
                n_top_logprobs=20,
            )
        )  # fmt: skip
    time.sleep(1)
    worker.socket.close()
    assert worker.wait(3) == 0


def test_a_worker_ends_when_its_server_goes_before_the_model_is_loaded(
    smollm2_path: Path,
) -> None:
    started = Worker()
    started.send(load_of(smollm2_path))
    started.socket.close()
    assert started.wait(5) in (0, 1)


def test_cancelling_what_is_unknown_does_nothing(worker: Worker) -> None:
    worker.send(Cancel(99))
    worker.send(Count(uid=1, prompts=((Segment("abc", True),),)))
    assert worker.events() == [Counted(uid=1, n_tokens=(4,))]
    worker.socket.close()
    assert worker.wait(3) == 0


def test_a_worker_wants_its_model_first() -> None:
    started = Worker()
    started.send(Cancel(1))
    assert started.wait(5) == 1
