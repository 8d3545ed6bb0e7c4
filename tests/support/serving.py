"""A real server process for tests and benchmarks, and the clients they drive it with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil


def free_port() -> int:
    """Return a port of the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running `headrace serve`; its url, its process, and the log it has written so far."""

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: Sequence[str] = (),
        launcher: Sequence[str] = (),
        environ: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log
        # A benchmark or test of something else need not wait for it; the last flag counts.
        flags = ["--measure", "never", *flags]
        command = list(launcher) or [sys.executable, "-m", "headrace.server"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "serve", str(model), "--port", str(self.port), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environ or {})},
            )

    def wait_ready(self, timeout_s: float = 60) -> None:
        """Wait until the model is loaded.

        Raises:
            RuntimeError: the server ended or took too long; with its log.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                name = self.names()[0]
                # A load request returns when the model is ready.
                body = {"model": name}
                httpx.post(f"{self.url}/api/generate", json=body, timeout=timeout_s)
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server is not ready: {self.log()}")

    def names(self) -> list[str]:
        """Return the names of the models that are served."""
        return [m["name"] for m in httpx.get(f"{self.url}/api/tags").json()["models"]]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def engines(self) -> list[psutil.Process]:
        """Return the engine processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """Ask the server to end and return its exit status; kill it after 20 s."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextlib.contextmanager
def serve(model: Path, log: Path, *flags: str, launcher: Sequence[str] = ()) -> Iterator[Server]:
    """Run a server with model loaded for the length of a with block."""
    server = Server(model, log, flags, launcher)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


class Record(NamedTuple):
    """One line of a stream and when it came, in seconds of time.monotonic."""

    at: float
    data: dict[str, Any]


def stream(url: str, path: str, body: dict[str, Any], timeout_s: float = 300) -> list[Record]:
    """Post body and return the records of the NDJSON answer."""
    records = []
    with httpx.stream("POST", url + path, json=body, timeout=timeout_s) as response:
        for line in response.iter_lines():
            records.append(Record(time.monotonic(), json.loads(line)))
    return records


def text_of(records: Sequence[Record]) -> str:
    """Return the whole answer of a generate or chat stream."""
    return "".join(
        r.data.get("response", "") + r.data.get("message", {}).get("content", "") for r in records
    )
