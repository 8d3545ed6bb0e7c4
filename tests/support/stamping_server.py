"""The server with stamping_worker as its engine process."""

from __future__ import annotations

from headrace.engine.client import EngineClient
from headrace.server.cli import main

if __name__ == "__main__":
    EngineClient.worker_module = "stamping_worker"
    main()
