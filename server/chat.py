"""POST /api/chat: a conversation in, its next message out."""

from __future__ import annotations

import time

from msgspec import to_builtins
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.engine.client import Stream
from headrace.engine.errors import InvalidRequest, PromptTooLong
from headrace.server.checks import check_model, check_options
from headrace.server.errors import JSON_TYPE
from headrace.server.models import LoadedModel, Models
from headrace.server.options import Options
from headrace.server.prompts import (
    Message,
    Prompt,
    Think,
    accepted,
    command,
    count,
    render,
    text_of,
    without_oldest,
)
from headrace.server.records import Records
from headrace.server.schemas import ChatBody, ChatMessage, decode
from headrace.server.stream import Beginning, Exchange, Job


async def chat(models: Models, request: Request) -> ASGIApp:
    """Return the application that answers a request; no messages load or unload the model.

    Raises:
        InvalidRequest, ModelNotFound, ModelUnusable: the request can't be answered.
    """
    arrived_ns = time.perf_counter_ns()
    body = decode(await request.body(), ChatBody)
    body.check()
    if not body.model:
        raise InvalidRequest("model is required")
    model = models.find(body.model)
    records = Records(body.model, is_chat=True)
    if not body.messages and body.keep_alive_s == 0:
        models.unload(model)
        return Response(records.ending("unload"), media_type=JSON_TYPE)
    needs = "tools" if body.tools else ""
    has_images = any(message.images for message in body.messages)
    think = check_model(body, model, "chat", needs=needs, has_images=has_images)
    conversation = Conversation(body, check_options(body), think)

    async def begin(loaded: LoadedModel) -> Beginning:
        if not body.messages:
            return records.ending("load")
        if body.debug_render_only:
            return records.debug(text_of(await conversation.render(loaded, 0)))
        return await conversation.submit(loaded)

    job = Job(model, body.keep_alive_s, records, body.stream, arrived_ns, begin)
    return Exchange(models, job)


class Conversation:
    """The messages of a request, and how they become a prompt that fits the context."""

    def __init__(self, body: ChatBody, options: Options, think: Think) -> None:
        self._body = body
        self._options = options
        self._think = think
        self._messages = [_plain(message) for message in body.messages]
        self._tools: list[Message] = to_builtins(body.tools)

    async def submit(self, loaded: LoadedModel) -> Stream:
        """Submit the conversation; if it is too long and may be cut, without its oldest messages.

        Raises:
            PromptTooLong: even the last message alone is too long, or nothing may be dropped.
        """
        try:
            return await self._submit(loaded, 0)
        except PromptTooLong as error:
            if not self._body.truncate or len(self._messages) == 1:
                raise
            n_dropped = await self._shortest_cut(loaded, error.n_ctx)
        return await self._submit(loaded, n_dropped)

    async def render(self, loaded: LoadedModel, n_dropped: int) -> Prompt:
        """Return the prompt without the first n_dropped messages, but with all system messages."""
        kept = without_oldest(self._messages, n_dropped)
        return await render(loaded, kept, self._tools, self._think)

    async def _submit(self, loaded: LoadedModel, n_dropped: int) -> Stream:
        prompt = await self.render(loaded, n_dropped)
        uid = loaded.engine.next_uid()
        return await accepted(loaded.engine, command(self._body, self._options, uid, prompt))

    async def _shortest_cut(self, loaded: LoadedModel, n_ctx: int) -> int:
        """Return how many of the oldest messages must go for the prompt to leave room in n_ctx.

        A bisection: counting every cut would tokenise a long history many times over.
        """
        fewest, most = 1, len(self._messages) - 1
        while fewest < most:
            middle = (fewest + most) // 2
            if await count(loaded.engine, await self.render(loaded, middle)) < n_ctx:
                most = middle
            else:
                fewest = middle + 1
        return fewest


def _plain(message: ChatMessage) -> Message:
    """Return message as a template sees it: only what was given, and content always."""
    fields: dict[str, object] = to_builtins(message)
    return fields | {"role": (message.role or "").lower(), "content": message.content or ""}
