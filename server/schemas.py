"""The request bodies of /api/*: comes in the bytes of a body, goes out a checked struct.

Bodies are JSON whatever the Content-Type says. Keys of the top level are matched in any case, the
last of equal ones wins, null is "not given", unknown keys are ignored. Everything that is wrong
with a body is an InvalidRequest; nothing here knows which models exist.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta, Struct, field

from headrace.config.units import parse_duration
from headrace.engine.errors import InvalidRequest

Body = TypeVar("Body", bound=Struct)
Think = bool | Literal["low", "medium", "high", "max"]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Object = dict[str, object]

BOM = b"\xef\xbb\xbf"
THINK_LEVELS = ("low", "medium", "high", "max")


class ToolCallFunction(Struct, omit_defaults=True):
    """What an assistant's message of the history called; arguments is an object, not its text."""

    name: str = ""
    arguments: Object = field(default_factory=dict)
    index: int | None = None


class ToolCall(Struct, omit_defaults=True):
    """One call in an assistant's message of the history."""

    function: ToolCallFunction
    id: str | None = None


class ChatMessage(Struct, omit_defaults=True):
    """One message of a chat."""

    role: str | None = None
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Tool(Struct):
    """A function that the model may call; its schema goes to the template as it came."""

    function: Object
    type: str | None = None


class ShowBody(Struct):
    """Body of /api/show; name is the older word for model."""

    model: str = ""
    name: str = ""
    verbose: bool = False
    system: str = ""


class AnswerBody(Struct):
    """What /api/generate and /api/chat have in common."""

    model: str = ""
    stream: bool = True
    format: object = None
    keep_alive: object = None
    options: Object = field(default_factory=dict)
    think: object = None
    truncate: bool = True
    shift: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    debug_render_only: bool = field(default=False, name="_debug_render_only")

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds, math.inf for ever, None if not given; a quoted plain number is seconds too."""
        value = self.keep_alive
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise InvalidRequest(f"Unsupported type: '{_json_type(value)}'")
        try:
            return parse_duration(value)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    @property
    def n_top_logprobs(self) -> int:
        """-1: no logprobs; else the number of alternatives."""
        return self.top_logprobs if self.logprobs else -1

    def check(self) -> None:
        """Check what the types can't say and no model is needed for.

        Raises:
            InvalidRequest: think, keep_alive, an image or top_logprobs is wrong.
        """
        _check_think(self.think)
        _ = self.keep_alive_s
        if not 0 <= self.top_logprobs <= 20:
            raise InvalidRequest("top_logprobs must be between 0 and 20")


class GenerateBody(AnswerBody):
    """Body of /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    context: list[TokenId] = field(default_factory=list)
    raw: bool = False
    images: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Check as AnswerBody does, and the images."""
        _check_images(self.images)
        super().check()


class ChatBody(AnswerBody):
    """Body of /api/chat."""

    messages: list[ChatMessage] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)

    def check(self) -> None:
        """Check as AnswerBody does, and the images of all messages."""
        for message in self.messages:
            _check_images(message.images or [])
        super().check()


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Return the body of type kind that raw spells.

    Raises:
        InvalidRequest: raw is empty, no JSON object, or a field has a value of another type.
    """
    raw = raw.removeprefix(BOM).strip()
    if not raw:
        raise InvalidRequest("missing request body")
    try:
        # Refuses what Python's json lets pass: NaN, lone surrogates, endless digits or nesting.
        value = orjson.loads(raw)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise InvalidRequest(f"expected a JSON object, found {_json_type(value)}")
        lowered = {key.lower(): item for key, item in value.items()}
        given = {key: item for key, item in lowered.items() if item is not None}
        return msgspec.convert(given, kind)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"invalid JSON: {error}") from error
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"invalid request body: {error}") from error


def _check_think(think: object) -> None:
    if think is None or isinstance(think, bool):
        return
    if not isinstance(think, str):
        raise InvalidRequest(
            "think must be a boolean or string (true, false, "
            + ", ".join(f'"{level}"' for level in THINK_LEVELS)
            + ")"
        )
    if think not in THINK_LEVELS:
        raise InvalidRequest(
            f'invalid think value: "{think}"'
            ' (must be "low", "medium", "high", "max", true, or false)'
        )


def _check_images(images: list[str]) -> None:
    for image in images:
        try:
            base64.b64decode(image, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"illegal base64 data in image: {error}") from error


def _json_type(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
