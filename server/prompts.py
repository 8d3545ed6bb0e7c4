"""From messages to a request that the engine has accepted: rendering, counting, submitting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headrace.engine.client import EngineClient, Stream
from headrace.engine.messages import Count, Counted, Failed, Generate, Segment
from headrace.server.errors import error_of
from headrace.server.models import LoadedModel
from headrace.server.options import Options
from headrace.server.schemas import AnswerBody

Prompt = tuple[Segment, ...]
Message = Mapping[str, object]
Think = bool | str | None


async def render(
    loaded: LoadedModel,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] = (),
    think: Think = None,
) -> Prompt:
    """Return messages as the model's chat template writes them.

    In a thread: a template comes from a stranger's file and may take its time.

    Raises:
        InvalidRequest: the template refuses them.
    """
    return await asyncio.to_thread(loaded.template.render, messages, tools, think)


def without_oldest(messages: Sequence[Message], n_dropped: int) -> list[Message]:
    """Return messages without the first n_dropped, but with all system messages."""
    system = [message for message in messages[:n_dropped] if message["role"] == "system"]
    return [*system, *messages[n_dropped:]]


def command(body: AnswerBody, options: Options, uid: int, prompt: Prompt) -> Generate:
    """Return what the engine is told, as far as both endpoints say it alike."""
    return Generate(
        uid=uid,
        prompt=prompt,
        sampling=options.sampling,
        n_ctx=options.n_ctx,
        n_predict=options.n_predict,
        n_keep=options.n_keep,
        stop=options.stop,
        shifts=body.shift,
        n_top_logprobs=body.n_top_logprobs,
    )


async def accepted(engine: EngineClient, request: Generate) -> Stream:
    """Return the stream of request once its prompt is tokenised and fits; the caller's to cancel.

    Raises:
        PromptTooLong, InvalidRequest, EngineDied: the engine did not accept it.
    """
    stream = engine.submit(request)
    try:
        event = await stream.next()
        if isinstance(event, Failed):
            raise error_of(event)
    except BaseException:
        stream.cancel()
        raise
    return stream


async def count(engine: EngineClient, prompt: Prompt) -> int:
    """Return the number of tokens of prompt."""
    stream = engine.submit(Count(uid=engine.next_uid(), prompts=(prompt,)))
    try:
        event = await stream.next()
    finally:
        stream.cancel()
    if isinstance(event, Failed):
        raise error_of(event)
    assert isinstance(event, Counted), event
    return event.n_tokens[0]


def text_of(prompt: Prompt) -> str:
    """Return prompt as one text."""
    return "".join(segment.text for segment in prompt)
