"""What /api/generate and /api/chat check alike before a request may wait for its model.

The order is the protocol's, so that a client with two mistakes is told the one it expects. Takes a
decoded body and the model it names; knows no engine.
"""

from __future__ import annotations

import orjson

from headrace.engine.errors import InvalidRequest
from headrace.engine.library import Model
from headrace.server.options import Options, parse
from headrace.server.prompts import Think
from headrace.server.schemas import AnswerBody


def check_model(
    body: AnswerBody, model: Model, endpoint: str, *, needs: str, has_images: bool
) -> Think:
    """Return whether to think, once it is sure that model can do what is asked of it.

    needs is the capability that the request takes beside completion, or "".

    Raises:
        InvalidRequest: the model lacks something.
    """
    think = _think(body, model)
    if "completion" not in model.capabilities:
        raise InvalidRequest(f'"{body.model}" does not support {endpoint}')
    if needs and needs not in model.capabilities:
        name = model.name  # clients know this error by the full name
        full = f"{name.host}/{name.namespace}/{name.model}:{name.tag}"
        raise InvalidRequest(f"{full} does not support {needs}")
    if has_images:
        raise InvalidRequest(f'"{body.model}" does not support images')
    return think


def check_options(body: AnswerBody) -> Options:
    """Return the options of body; raises InvalidRequest if they or its format are wrong."""
    options = parse(body.options)
    if body.format is None or body.format == "":
        return options
    if body.format == "json" or isinstance(body.format, dict):
        raise InvalidRequest("structured output (format) is not supported yet")
    quoted = orjson.dumps(orjson.dumps(body.format).decode()).decode()
    raise InvalidRequest(f'invalid format: {quoted}; expected "json" or a valid JSON Schema object')


def _think(body: AnswerBody, model: Model) -> Think:
    """Return the think that is asked for; unasked, a model that can think does."""
    can_think = "thinking" in model.capabilities
    if body.think is None:
        return True if can_think else None
    if body.think is not False and not can_think:
        raise InvalidRequest(f'"{body.model}" does not support thinking')
    assert isinstance(body.think, bool | str), "checked with the body"
    return body.think
