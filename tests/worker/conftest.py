"""Engines in the test's own process, closed and checked when the test is over; streamed models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import streaming_models
from driver import Driver

from headrace.engine import llama


@pytest.fixture(scope="session")
def backend() -> None:
    """llama.cpp, initialised once in this process."""
    llama.start_backend()


@pytest.fixture
def open_engine(backend: None, request: pytest.FixtureRequest) -> Iterator[Callable[..., Driver]]:
    """Open engines by the name of a model's fixture; at the end none of them holds anything."""
    drivers: list[Driver] = []

    def open_one(name: str, **options: Any) -> Driver:
        if name.startswith("tiny"):
            options = {"n_batch": 128, "kv_type": "f32"} | options
        drivers.append(Driver(request.getfixturevalue(f"{name}_path"), **options))
        return drivers[-1]

    yield open_one
    for driver in drivers:
        driver.close()


@pytest.fixture(scope="session")
def built(backend: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the path of the model of a name in streaming_models.SHAPES, built when asked for."""
    folder = tmp_path_factory.mktemp("streamed")

    @cache
    def build(name: str) -> Path:
        return streaming_models.build(streaming_models.SHAPES[name], folder, name)

    return build
