"""Engines in the test's own process, closed and checked when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
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
