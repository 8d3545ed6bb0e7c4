"""What is left after engines die, clients leave and signals come."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Server, serve, stream, text_of
from waiting import wait_until

pytestmark = pytest.mark.e2e

LONG = {"temperature": 0, "num_predict": 1500, "num_ctx": 2048}


def n_descriptors(server: Server) -> int:
    return psutil.Process(server.process.pid).num_fds()


def test_killed_engine_ends_the_stream_with_an_error_and_the_next_request_works(
    smollm2_server: Server,
) -> None:
    server, name = smollm2_server, smollm2_server.names()[0]
    body = {"model": name, "prompt": "Count to a thousand.", "options": LONG}
    stream(server.url, "/api/generate", {**body, "options": {"num_predict": 1}})
    before = n_descriptors(server)
    lines = []
    with httpx.stream("POST", f"{server.url}/api/generate", json=body, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(json.loads(line))
            if len(lines) == 5:
                (engine,) = server.engines()
                engine.kill()
    assert response.status_code == 200
    assert lines[-1]["error"].startswith("an error was encountered while running the model")
    assert not any("done_reason" in line for line in lines)
    records = stream(server.url, "/api/generate", {**body, "options": {"num_predict": 3}})
    assert records[-1].data["done"]
    assert len(server.engines()) == 1
    assert not engine.is_running()
    wait_until(lambda: n_descriptors(server) <= before + 1, "back to the descriptors of before")


def test_engine_killed_before_the_first_byte_is_a_500(smollm2_server: Server) -> None:
    server = smollm2_server
    body = {"model": server.names()[0], "prompt": "1, 2, 3, 4, 5,", "raw": True, "options": LONG}
    body["stream"] = False
    stream(server.url, "/api/generate", {**body, "options": {"num_predict": 1}})  # it is loaded
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{server.url}/api/generate", json=body, timeout=60)
        time.sleep(0.5)
        server.engines()[0].kill()
    assert answer.result().status_code == 500
    assert "model runner has unexpectedly stopped" in answer.result().json()["error"]


def test_200_clients_that_drop_their_streams_leave_nothing(smollm2_server: Server) -> None:
    server, name = smollm2_server, smollm2_server.names()[0]
    rng = random.Random(7)

    def connect_and_drop(n: int) -> None:
        body = json.dumps(
            {"model": name, "prompt": f"Story {n}: " + "sea " * rng.randrange(200), "options": LONG}
        ).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /api/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            client.settimeout(rng.random() * 0.6)
            try:
                client.recv(rng.randrange(1, 2000))
            except TimeoutError:
                return

    def run(n_clients: int) -> None:
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(connect_and_drop, range(n_clients)))
        ask = {"model": name, "prompt": "hi", "options": {"num_predict": 2}}
        started = time.monotonic()
        assert stream(server.url, "/api/generate", ask)[-1].data["done"]
        assert time.monotonic() - started < 10

    run(40)  # until pools and caches are filled
    (engine,) = server.engines()
    fds, threads, memory = n_descriptors(server), engine.num_threads(), engine.memory_info().rss
    served = psutil.Process(server.process.pid).memory_info().rss
    run(200)
    wait_until(lambda: n_descriptors(server) <= fds + 2, "back to the descriptors of before")
    assert engine.is_running()
    wait_until(lambda: engine.num_threads() <= threads, "back to the threads of before")
    assert engine.memory_info().rss < memory + (32 << 20)
    assert psutil.Process(server.process.pid).memory_info().rss < served + (32 << 20)
    wait_until(lambda: engine.cpu_percent(0.5) < 20, "idle")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_server_engine_and_open_stream(
    smollm2_path: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with serve(smollm2_path, tmp_path / "log") as server:
        body = {"model": server.names()[0], "prompt": "Count.", "options": LONG}
        engines = server.engines()
        lines = []
        with httpx.stream("POST", f"{server.url}/api/generate", json=body, timeout=60) as response:
            for line in response.iter_lines():
                lines.append(json.loads(line))
                if len(lines) == 3:
                    started = time.monotonic()
                    server.process.send_signal(number)
        assert "error" in lines[-1]
        assert server.process.wait(15) == 0
        assert time.monotonic() - started < 10
        wait_until(lambda: not any(e.is_running() for e in engines), "without engine processes")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", server.port))


def test_killed_server_leaves_no_engine(smollm2_path: Path, tmp_path: Path) -> None:
    with serve(smollm2_path, tmp_path / "log") as server:
        engines = server.engines()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_until(lambda: not any(e.is_running() for e in engines), "without engine processes")


def test_file_truncated_while_loaded_costs_a_request_not_the_server(
    smollm2_path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "live.gguf"
    copy.write_bytes(smollm2_path.read_bytes())
    with serve(copy, tmp_path / "log") as server:
        ask = {"model": "live", "prompt": "hi", "stream": False, "options": {"num_predict": 2}}
        assert httpx.post(f"{server.url}/api/generate", json=ask, timeout=60).status_code == 200
        os.truncate(copy, 10 << 20)
        failed = httpx.post(f"{server.url}/api/generate", json=ask, timeout=60)
        assert failed.status_code == 500
        assert "live.gguf" in failed.json()["error"]
        assert httpx.get(f"{server.url}/api/tags").status_code == 200
        copy.write_bytes(smollm2_path.read_bytes())
        assert httpx.post(f"{server.url}/api/generate", json=ask, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
        (b"GGUF" + b"\xff" * 45, ""),
    ],
)
def test_bad_file_is_one_line_and_status_1(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    run = subprocess.run(
        [sys.executable, "-m", "headrace.server", "serve", str(path)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1, run.stderr
    assert str(path) in run.stderr
    assert reason in run.stderr.lower()


def test_port_in_use_is_one_line_and_status_1(smollm2_server: Server, smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.server", "serve", str(smollm2_path)]
    run = subprocess.run(
        [*command, "--port", str(smollm2_server.port)], capture_output=True, text=True, timeout=30
    )
    assert run.returncode == 1
    assert f"port {smollm2_server.port}" in run.stderr
    assert run.stderr.count("\n") == 1, run.stderr


def test_text_is_the_same_alone_and_in_company(smollm2_server: Server) -> None:
    server, name = smollm2_server, smollm2_server.names()[0]
    bodies = [
        {
            "model": name,
            "prompt": f"Tell me about {topic}.",
            "options": {"temperature": 0, "num_predict": 24},
        }
        for topic in ("the sea", "a ship", "rain", "bread", "iron", "bees", "snow", "a lamp")
    ]
    alone = [text_of(stream(server.url, "/api/generate", body)) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda body: text_of(stream(server.url, "/api/generate", body)), bodies)
        )
    assert together == alone
