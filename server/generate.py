"""POST /api/generate: one prompt in, one answer out."""

from __future__ import annotations

import time

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.engine.errors import InvalidRequest, ModelNotFound
from headrace.engine.messages import Segment
from headrace.server.checks import check_model, check_options
from headrace.server.errors import JSON_TYPE
from headrace.server.models import LoadedModel, Models
from headrace.server.prompts import Prompt, Think, accepted, command, render, text_of
from headrace.server.records import Records
from headrace.server.schemas import GenerateBody, decode
from headrace.server.stream import Beginning, Exchange, Job


async def generate(models: Models, request: Request) -> ASGIApp:
    """Return the application that answers a request; an empty prompt loads or unloads the model.

    Raises:
        InvalidRequest, ModelNotFound, ModelUnusable: the request can't be answered.
    """
    arrived_ns = time.perf_counter_ns()
    body = decode(await request.body(), GenerateBody)
    body.check()
    if not body.model:
        raise ModelNotFound("model '' not found")
    model = models.find(body.model)
    records = Records(body.model, is_chat=False)
    if not body.prompt and body.keep_alive_s == 0:
        models.unload(model)
        return Response(records.ending("unload"), media_type=JSON_TYPE)
    _check_template(body)
    needs = "insert" if body.suffix else ""
    think = check_model(body, model, "generate", needs=needs, has_images=bool(body.images))
    options = check_options(body)

    async def begin(loaded: LoadedModel) -> Beginning:
        if not body.prompt:
            return records.ending("load")
        prompt = await _prompt(body, loaded, think)
        if body.debug_render_only:
            return records.debug(text_of(prompt))
        plain = command(body, options, loaded.engine.next_uid(), prompt)
        generation = replace(
            plain,
            truncates=body.truncate,
            prefix_tokens=tuple(body.context),
            wants_context=not body.raw,
        )
        return await accepted(loaded.engine, generation)

    job = Job(model, body.keep_alive_s, records, body.stream, arrived_ns, begin)
    return Exchange(models, job)


def _check_template(body: GenerateBody) -> None:
    """Raise InvalidRequest if body contradicts raw or brings a template of its own."""
    if body.raw and (body.template or body.system or body.context):
        raise InvalidRequest("raw mode does not support template, system, or context")
    if body.template:
        raise InvalidRequest("per-request Go templates are not supported")


async def _prompt(body: GenerateBody, loaded: LoadedModel, think: Think) -> Prompt:
    """Return the prompt as it is, if it is raw, or as the only turn of a chat."""
    if body.raw:
        return (Segment(body.prompt, is_trusted=True),)
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return await render(loaded, messages, think=think)
