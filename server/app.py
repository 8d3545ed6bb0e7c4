"""The HTTP application and its life: routes in, an ASGI application out, and its run under uvicorn.

The only file that knows FastAPI's and uvicorn's life cycle. Routes are plain ASGI applications, so
that no framework decodes a body or words an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.config import Settings
from headrace.engine.errors import EngineError
from headrace.engine.library import Model
from headrace.server import info
from headrace.server.announcement import announce
from headrace.server.chat import chat
from headrace.server.errors import Endpoint, Handler, ShuttingDown
from headrace.server.generate import generate
from headrace.server.models import Models
from headrace.server.origins import OriginGuard

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What open answers get to end after a signal; only a client that does not read takes that long.
GRACE_S = 3
# Clients keep idle connections for some seconds and trip over one that is closed first.
KEEP_ALIVE_S = 75


def create_app(settings: Settings, models: Models) -> FastAPI:
    """Return the application that serves models; its end closes them."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await models.close()

    app = FastAPI(
        lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.router.routes[:] = _routes(models)
    paths = {route.path for route in app.router.routes if isinstance(route, Route)}
    app.add_exception_handler(404, partial(_not_found, paths))
    app.add_exception_handler(405, _method_not_allowed)
    app.add_middleware(OriginGuard, bound_host=settings.host, origins=settings.origins)
    return app


def _routes(models: Models) -> list[Route]:
    return [
        _route("/", ("GET", "HEAD"), info.root),
        _route("/api/version", ("GET", "HEAD"), info.version),
        _route("/api/tags", ("GET", "HEAD"), partial(info.tags, models)),
        _route("/api/ps", ("GET",), partial(info.ps, models)),
        _route("/api/show", ("POST",), partial(info.show, models)),
        _route("/api/generate", ("POST",), partial(generate, models)),
        _route("/api/chat", ("POST",), partial(chat, models)),
    ]


def _route(path: str, methods: tuple[str, ...], handler: Handler) -> Route:
    route = Route(path, Endpoint(handler), methods=methods, name=path)
    route.methods = set(methods)  # Starlette adds HEAD to every GET
    return route


async def _not_found(paths: set[str], request: Request, _: Exception) -> Response:
    """Answer a path that is not served; one with a slash too many leads to the right one."""
    path = request.url.path
    if path.endswith("/") and (bare := path.rstrip("/")) in paths:
        query = f"?{request.url.query}" if request.url.query else ""
        status = 301 if request.method == "GET" else 307
        return Response(status_code=status, headers={"Location": bare + query})
    return PlainTextResponse("404 page not found", 404)


async def _method_not_allowed(_: Request, error: Exception) -> Response:
    headers = error.headers if isinstance(error, HTTPException) else None
    return PlainTextResponse("405 method not allowed", 405, headers=headers)


class _Server(uvicorn.Server):
    """A uvicorn server that tells open answers when it is about to end, and then just returns."""

    def __init__(self, config: uvicorn.Config, models: Models) -> None:
        super().__init__(config)
        self._models = models

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again at the end: an end that was asked for is 0."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.stop()
        await super().shutdown(sockets)


async def serve(
    settings: Settings, models: Models, listener: socket.socket, first: Model
) -> EngineError | None:
    """Serve models on listener until a signal comes; first is loaded at once.

    Returns the error if first can't be loaded: then there is nothing to serve.
    """
    config = uvicorn.Config(
        create_app(settings, models),
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, models)
    preload = asyncio.create_task(_preload(server, models, first, url_of(listener)))
    await server.serve([listener])
    await models.close()  # uvicorn leaves the application's end out when it is hurried
    return await preload


async def _preload(
    server: uvicorn.Server, models: Models, model: Model, url: str
) -> EngineError | None:
    """Load model and say so; end the server if that fails."""
    try:
        with models.lease(model) as lease:
            loaded = await lease.loaded()
    except ShuttingDown:
        return None
    except EngineError as error:
        server.should_exit = True
        return error
    except Exception:  # a bug: serve raises it when the server has ended
        server.should_exit = True
        raise
    for line in announce(model, url, loaded.engine.loaded):
        logger.info("%s", line)
    return None


def url_of(listener: socket.socket) -> str:
    """Return the URL under which listener is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
