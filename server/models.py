"""Which engine process serves which model: loads, keeps, unloads, replaces after a death.

Comes in a model that a request wants, goes out its engine for as long as a lease is held. One load
runs at a time and all who wait for a model share it. A lease that nobody holds any more stops its
load; the last one to end starts the keep-alive clock. Belongs to one asyncio loop; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType

from headrace.config import Settings
from headrace.engine.chat import ChatTemplate
from headrace.engine.client import EngineClient
from headrace.engine.errors import ModelNotFound, Overloaded
from headrace.engine.library import Library, Model
from headrace.engine.messages import Load, Loaded, Status
from headrace.server.errors import BUSY, ShuttingDown

PlanLoad = Callable[[Model, Settings], Load]
StartEngine = Callable[[Load], Awaitable[EngineClient]]

# What "for ever" is in expires_at: a date that every client can parse (Go's longest duration).
FOREVER = timedelta(days=292 * 365)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, the engine that runs it, and its chat template."""

    model: Model
    engine: EngineClient
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class Residence:
    """What /api/ps says about one model; one that is being loaded has no context yet."""

    model: Model
    n_bytes: int
    n_ctx: int
    expires_at: datetime
    loaded: Loaded | None = None
    """None: it is being loaded."""
    status: Status | None = None


class _Entry:
    """A model that is loaded or being loaded, and how many leases on it are held."""

    def __init__(self, model: Model, keep_alive_s: float, n_slots: int) -> None:
        self.model = model
        self.n_slots = n_slots
        self.keep_alive_s = keep_alive_s
        self.n_held = 0
        self.loaded: LoadedModel | None = None
        self.loading: asyncio.Task[LoadedModel] | None = None
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the engine lives and runs what the file holds now."""
        loaded = self.loaded
        return loaded is not None and loaded.engine.is_alive and loaded.model.is_current()

    @property
    def remaining_s(self) -> float:
        """Seconds until the model is unloaded, if no further request comes."""
        if self.expiry is None:
            return self.keep_alive_s
        return self.expiry.when() - asyncio.get_running_loop().time()


class Lease:
    """One request's claim to a model, from before its load to after its last token."""

    def __init__(self, models: Models, entry: _Entry) -> None:
        self._models = models
        self._entry = entry

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._models._release(self._entry)

    async def loaded(self) -> LoadedModel:
        """Return the model once its engine is ready, loading it if need be.

        Raises:
            ModelUnusable, EngineDied: the load failed.
        """
        return await self._models._loaded(self._entry)


class Models:
    """The models that this server serves, and the engine processes it has started for them."""

    def __init__(
        self,
        library: Library,
        settings: Settings,
        plan_load: PlanLoad,
        start_engine: StartEngine = EngineClient.start,
    ) -> None:
        self.library = library
        self.stopping = asyncio.Event()
        """Set when the server is to end: open requests end with an error, new ones are refused."""
        self._settings = settings
        self._plan_load = plan_load
        self._start_engine = start_engine
        self._entries: dict[Path, _Entry] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._load_lock = asyncio.Lock()

    def find(self, name: str) -> Model:
        """Return the model that a request calls name, as its file is now.

        Raises:
            InvalidRequest: name is malformed.
            ModelNotFound: there is none.
            ModelUnusable: its file was changed and can't be used any more.
        """
        model = self.library.find(name)
        if model is None:
            raise ModelNotFound(f"model '{name}' not found")
        return self.library.refresh(model.name)

    def lease(self, model: Model, keep_alive_s: float | None = None) -> Lease:
        """Return a claim to model, to be used in a with statement.

        keep_alive_s replaces the model's keep-alive, None leaves it.

        Raises:
            Overloaded: as many requests as the queue holds are waiting already.
            ShuttingDown: the server is about to end.
        """
        if self.stopping.is_set():
            raise ShuttingDown
        entry = self._entries.get(model.path)
        if entry is not None and entry.n_held == 0 and not entry.is_usable:
            self._drop(entry)
            entry = None
        if entry is None:
            n_slots = self._plan_load(model, self._settings).n_slots
            entry = _Entry(model, self._settings.keep_alive, n_slots)
            self._entries[model.path] = entry
        if entry.n_held >= entry.n_slots + self._settings.max_queue:
            raise Overloaded(BUSY)
        entry.model = model
        if keep_alive_s is not None:
            entry.keep_alive_s = keep_alive_s
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        entry.n_held += 1
        return Lease(self, entry)

    def unload(self, model: Model) -> None:
        """End model's engine, at once or when its last request has ended."""
        entry = self._entries.get(model.path)
        if entry is not None:
            entry.keep_alive_s = 0
            if entry.n_held == 0:
                self._drop(entry)

    def residences(self) -> list[Residence]:
        """Return the models that are loaded or being loaded, the last to expire first."""
        alive = [
            entry
            for entry in self._entries.values()
            if entry.loading is not None or (entry.loaded and entry.loaded.engine.is_alive)
        ]
        alive.sort(key=lambda entry: entry.remaining_s, reverse=True)
        return [_residence(entry) for entry in alive]

    def stop(self) -> None:
        """Let open requests end with an error and refuse new ones."""
        self.stopping.set()

    async def close(self) -> None:
        """End all engines, stop all loads, and wait until they are gone."""
        self.stop()
        loads = {entry.loading for entry in self._entries.values() if entry.loading is not None}
        for entry in list(self._entries.values()):
            self._drop(entry)
        if pending := loads | self._endings:
            await asyncio.wait(pending)

    async def _loaded(self, entry: _Entry) -> LoadedModel:
        if self.stopping.is_set():
            raise ShuttingDown
        if entry.loaded is not None and entry.loaded.engine.is_alive:
            return entry.loaded
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry))
        try:
            return await asyncio.shield(entry.loading)  # it is not this request's alone
        except asyncio.CancelledError:
            if self.stopping.is_set():  # the load was cancelled, not this request
                raise ShuttingDown from None
            raise

    async def _load(self, entry: _Entry) -> LoadedModel:
        try:
            async with self._load_lock:
                if entry.loaded is not None:
                    self._end(entry.loaded.engine)
                    entry.loaded = None
                if self._endings:  # their memory is needed
                    await asyncio.wait(self._endings)
                engine = await self._start_engine(self._plan_load(entry.model, self._settings))
                try:
                    template = await asyncio.to_thread(_template, entry.model, engine)
                except BaseException:
                    self._end(engine)
                    raise
                entry.loaded = LoadedModel(entry.model, engine, template)
                return entry.loaded
        finally:
            entry.loading = None

    def _release(self, entry: _Entry) -> None:
        entry.n_held -= 1
        if entry.n_held > 0:
            return
        if not entry.is_usable or entry.keep_alive_s <= 0:
            self._drop(entry)
        elif entry.keep_alive_s < math.inf:
            loop = asyncio.get_running_loop()
            entry.expiry = loop.call_later(entry.keep_alive_s, self._drop, entry)

    def _drop(self, entry: _Entry) -> None:
        """Forget entry and let its engine or its load end in the background."""
        if self._entries.get(entry.model.path) is entry:
            del self._entries[entry.model.path]
        if entry.expiry is not None:
            entry.expiry.cancel()
        if entry.loading is not None:
            entry.loading.cancel()
        if entry.loaded is not None:
            self._end(entry.loaded.engine)
            entry.loaded = None

    def _end(self, engine: EngineClient) -> None:
        ending = asyncio.create_task(engine.close())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)


def _template(model: Model, engine: EngineClient) -> ChatTemplate:
    loaded = engine.loaded
    return ChatTemplate(model.template, loaded.bos, loaded.eos, loaded.control_tokens)


def _residence(entry: _Entry) -> Residence:
    now = datetime.now().astimezone()
    remaining_s = entry.remaining_s
    keep = FOREVER if remaining_s >= FOREVER.total_seconds() else timedelta(seconds=remaining_s)
    if entry.loaded is None:
        return Residence(entry.model, entry.model.size_bytes, 0, now + keep)
    engine = entry.loaded.engine
    n_bytes = engine.loaded.weights_bytes + engine.context_bytes
    return Residence(entry.model, n_bytes, engine.n_ctx, now + keep, engine.loaded, engine.status)
