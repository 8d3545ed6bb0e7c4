"""Real server processes on real models, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Server, serve


@pytest.fixture(scope="module")
def smollm2_server(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("smollm2") / "log"
    with serve(smollm2_path, log, "--context", "2048") as server:
        yield server


@pytest.fixture(scope="module")
def gemma3_server(gemma3_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("gemma3") / "log"
    with serve(gemma3_path, log) as server:
        yield server


@pytest.fixture(scope="module", params=["smollm2_server", "gemma3_server"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of the two models' servers in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found
