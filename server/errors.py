"""Errors as HTTP answers: comes in an exception or a Failed event, goes out a status and a text.

Every error body is {"error": "<text>"}; only this module writes one. The texts that clients look
for are the reference protocol's. Knows nothing of models or routes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.engine.errors import EngineDied, EngineError, PromptTooLong
from headrace.engine.messages import Failed

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json; charset=utf-8"

BUSY = "server busy, please try again.  maximum pending requests exceeded"
ENGINE_STOPPED = (
    "model runner has unexpectedly stopped, this may be due to resource limitations"
    " or an internal error, check headrace's log for details"
)
ENGINE_STOPPED_MIDWAY = "an error was encountered while running the model: it has stopped"
INTERNAL = "internal server error"

Handler = Callable[[Request], Awaitable[ASGIApp]]


class ShuttingDown(EngineError):
    """The server has been told to stop."""

    status = 503

    def __init__(self) -> None:
        super().__init__("server is shutting down")


def error_of(failed: Failed) -> EngineError:
    """Return the error that a Failed event stands for, with the status that it carries."""
    if failed.kind == PromptTooLong.__name__:
        return PromptTooLong(failed.n_prompt, failed.n_ctx)
    error = EngineError(failed.message)
    error.status = failed.status
    return error


def error_text(error: EngineError, is_midway: bool = False) -> str:
    """Return what a client is told; is_midway says that a part of the answer was already sent."""
    if isinstance(error, EngineDied):
        return ENGINE_STOPPED_MIDWAY if is_midway else ENGINE_STOPPED
    return str(error)


def error_body(text: str) -> bytes:
    """Return the JSON object of an error; a lone surrogate in text becomes a question mark."""
    return orjson.dumps({"error": text.encode("utf-8", "replace").decode()})


def error_response(error: EngineError) -> Response:
    """Return the answer to a request that failed before anything was sent."""
    return Response(error_body(error_text(error)), error.status, media_type=JSON_TYPE)


class Endpoint:
    """The ASGI application of a route; whatever its handler raises becomes an answer."""

    def __init__(self, handler: Handler) -> None:
        """Take what turns a request into the application that answers it."""
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._handler(request)
        except ClientDisconnect:  # in the middle of its body: nobody is there to answer
            return
        except EngineError as error:
            answer = error_response(error)
        except Exception:  # a bug must not become a framework's error page
            logger.exception("%s %s failed", request.method, request.url.path)
            answer = error_response(EngineError(INTERNAL))
        await answer(scope, receive, send)
