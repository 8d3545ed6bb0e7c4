"""Loads, keep-alive, unloading and replacement of models."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Settings
from headrace.engine.errors import Overloaded
from headrace.engine.library import Library
from headrace.server.models import Models

pytestmark = pytest.mark.anyio


async def use(models: Models, name: str = "m", keep_alive_s: float | None = None) -> Any:
    """Load a model as a request does that ends at once, and return its engine."""
    with models.lease(models.find(name), keep_alive_s) as lease:
        return (await lease.loaded()).engine


async def test_requests_that_wait_share_one_load(models: Models, engines: Any) -> None:
    engines.gate.clear()
    waiting = [asyncio.ensure_future(use(models)) for _ in range(3)]
    await asyncio.sleep(0.01)
    [residence] = models.residences()
    assert (residence.n_ctx, residence.n_bytes) == (0, residence.model.size_bytes)
    engines.gate.set()
    assert set(await asyncio.gather(*waiting)) == {engines.only}


async def test_loads_run_one_at_a_time(models: Models, engines: Any) -> None:
    engines.gate.clear()
    loads = [asyncio.ensure_future(use(models, name)) for name in ("m", "tools")]
    await asyncio.sleep(0.01)
    assert engines.n_starting == 1
    engines.gate.set()
    await asyncio.gather(*loads)
    assert len(engines.started) == 2
    assert {str(r.model.name) for r in models.residences()} == {"m:latest", "tools:latest"}


async def test_idle_model_is_unloaded_when_its_time_is_over(models: Models) -> None:
    engine = await use(models, keep_alive_s=0.05)
    assert not engine.is_closed
    await asyncio.sleep(0.1)
    assert engine.is_closed
    assert models.residences() == []


async def test_clock_starts_when_the_last_request_ends(models: Models) -> None:
    with models.lease(models.find("m"), 0.05) as lease:
        engine: Any = (await lease.loaded()).engine
        await use(models)
        await asyncio.sleep(0.1)
        assert not engine.is_closed
    await asyncio.sleep(0.1)
    assert engine.is_closed


async def test_keep_alive_stays_until_another_is_given(models: Models) -> None:
    await use(models, keep_alive_s=1000)
    await use(models)
    [residence] = models.residences()
    left = residence.expires_at.timestamp() - time.time()
    assert left == pytest.approx(1000, abs=5)
    models.unload(models.find("m"))
    await use(models)
    [residence] = models.residences()
    left = residence.expires_at.timestamp() - time.time()
    assert left == pytest.approx(300, abs=5)


async def test_unload_waits_for_running_requests(models: Models) -> None:
    with models.lease(models.find("m")) as lease:
        engine: Any = (await lease.loaded()).engine
        models.unload(models.find("m"))
        await asyncio.sleep(0.01)
        assert not engine.is_closed
    assert models.residences() == []
    await asyncio.sleep(0.01)
    assert engine.is_closed


async def test_new_load_waits_until_the_old_engine_is_gone(models: Models, engines: Any) -> None:
    old = await use(models, keep_alive_s=0)
    new = await use(models)
    assert old.is_closed
    assert engines.started == [old, new]


async def test_engine_that_died_idle_is_not_listed_and_replaced(
    models: Models, engines: Any
) -> None:
    dead = await use(models)
    dead.die()
    assert models.residences() == []
    assert await use(models) is not dead
    assert dead.is_closed


async def test_replaced_file_is_loaded_anew_once_the_model_is_idle(
    models: Models, tmp_path: Path
) -> None:
    with models.lease(models.find("m")) as lease:
        old: Any = (await lease.loaded()).engine
        digest = models.find("m").digest
        os.utime(tmp_path / "m.gguf", (1, 1))
        assert await use(models) is old
        assert models.find("m").digest != digest
    new = await use(models)
    assert new is not old
    assert old.is_closed


async def test_a_model_of_its_own_has_a_queue_of_its_own(models: Models) -> None:
    leases = [models.lease(models.find("m")) for _ in range(3)]
    with pytest.raises(Overloaded):
        models.lease(models.find("m"))
    with models.lease(models.find("tools")):
        pass
    for lease in leases:
        lease.__exit__(None, None, None)


async def test_keep_alive_of_the_settings_may_be_zero(
    library: Library, engines: Any, plan: Any
) -> None:
    from_settings = Models(library, Settings(keep_alive=0.0), plan, engines.start)
    engine = await use(from_settings)
    await from_settings.close()
    assert engine.is_closed
    assert from_settings.residences() == []
