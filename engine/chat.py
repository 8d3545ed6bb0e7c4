"""Turn a conversation into the prompt that a model's chat template makes of it.

In: messages, tools and the think setting of a request, in Ollama's shape; the template, BOS, EOS
and control tokens of the model. Out: segments of text, those from the user marked as untrusted
where they spell a control token. Knows nothing of HTTP, of token ids and of the answer: tool
calls and thinking are to be told apart in it at the one place where text chunks become message
content, in server/stream.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from headrace.engine.errors import InvalidRequest
from headrace.engine.messages import Segment
from headrace.engine.template import (
    JinjaTemplate,
    JsonObject,
    TemplateRefused,
    template_supports_thinking,
    template_supports_tools,
)

ROLES = ("system", "user", "assistant", "tool")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Unicode noncharacters, for use inside one program. OPEN and CLOSE stand around untrusted text,
# CUT behind the text that the model is to continue.
_OPEN, _CLOSE, _CUT = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}{_CUT}]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_BRACKETS = "<>[]{}|/｜"  # noqa: RUF001 (DeepSeek's tokens have the fullwidth bar)
# What an assistant said comes from a model, and templates look for these in it.
_THINK_TAGS = frozenset(["<think>", "</think>"])

ChatMessage = dict[str, Any]


class ChatTemplate:
    """The chat template of one model; threads may render with it at the same time.

    Without a text it is ChatML (uses_fallback). A template that does not compile is reported by
    `fault` and by every rendering; raw prompts don't need it.
    """

    def __init__(
        self, text: str | None, bos: str, eos: str, control_tokens: Collection[str]
    ) -> None:
        self.uses_fallback = not (text or "").strip()
        source = CHATML if self.uses_fallback else text or ""
        self.supports_tools = template_supports_tools(source)
        self.supports_thinking = template_supports_thinking(source)
        self._template = JinjaTemplate(source)
        self.fault = self._template.fault
        self._bos = bos
        # Only as the variable is it surely a BOS: SmolLM2's turns begin with the same token.
        self._writes_bos = "bos_token" in source
        self._eos = eos
        self._control_tokens = _ControlTokens(control_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        think: bool | str | None = None,
    ) -> tuple[Segment, ...]:
        """Return the prompt for messages, without the BOS that the template puts first.

        Neighbours of one role are joined. If the last message is an assistant's without tool
        calls, the prompt ends in it, open, for the model to continue; if the template does not
        print its content as given, the message is closed and a new answer begins. think sets
        the variables that templates with thinking look at; None leaves the choice to them.

        Raises:
            InvalidRequest: a message is malformed, or the template can't render it.
        """
        try:
            guarded = _joined([_message(message, self._control_tokens) for message in messages])
            variables = self._variables(tools, think)
        except RecursionError:
            raise InvalidRequest("tools or arguments are nested too deeply") from None
        text = self._render_open(guarded, variables)
        if text is None:
            text = self._render_leniently(guarded, {**variables, "add_generation_prompt": True})
        if self._writes_bos:
            text = text.removeprefix(self._bos)
        return self._control_tokens.segments(text.replace(_CUT, ""))

    def _render_open(self, messages: list[ChatMessage], variables: dict[str, Any]) -> str | None:
        """Return the prompt up to the end of an assistant's last message, or None.

        None if the last message is another, or if the template does not print it as it is.
        """
        if not messages or messages[-1]["role"] != "assistant" or not _is_plain(messages[-1]):
            return None
        last = {**messages[-1], "content": messages[-1]["content"] + _CUT}
        text, is_cut, _ = self._render_leniently([*messages[:-1], last], variables).rpartition(_CUT)
        return text if is_cut else None

    def _variables(self, tools: Sequence[Any] | None, think: bool | str | None) -> dict[str, Any]:
        guard = self._control_tokens.guard_all
        variables = {
            "tools": [guard(tool) for tool in tools] if tools else None,
            "add_generation_prompt": False,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        if think is not None:  # two names of one thing: Qwen's and DeepSeek's
            variables |= {"enable_thinking": bool(think), "thinking": bool(think)}
        if isinstance(think, str):
            variables["reasoning_effort"] = think
        return variables

    def _render_leniently(self, messages: list[ChatMessage], variables: dict[str, Any]) -> str:
        """Render messages, and if the template refuses them, once more after each remedy.

        Raises:
            TemplateRefused: with what the template said about the messages as they came.
        """
        refusal: TemplateRefused | None = None
        for remedy in (None, *_REMEDIES):
            candidate = remedy(messages) if remedy else messages
            if refusal and candidate == messages:
                continue
            messages = candidate
            try:
                return self._template.render({**variables, "messages": messages})
            except TemplateRefused as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal


def _message(raw: Mapping[str, Any], control_tokens: _ControlTokens) -> ChatMessage:
    """Return what templates expect of the client's message, with the user's text guarded."""
    role = str(raw.get("role")).lower()
    if role not in ROLES:
        raise InvalidRequest(f"unknown role {role[:40]!r}, expected one of {', '.join(ROLES)}")
    spared = _THINK_TAGS if role == "assistant" else frozenset()

    def text(key: str) -> str:
        value = raw.get(key) or ""
        if not isinstance(value, str):
            raise InvalidRequest(f"{key} of a message must be a string")
        return control_tokens.guard(value, spared)

    message: ChatMessage = {"role": role, "content": text("content")}
    if thinking := text("thinking"):
        message["thinking"] = message["reasoning_content"] = thinking
    if calls := raw.get("tool_calls"):
        if not isinstance(calls, (list, tuple)):
            raise InvalidRequest("tool_calls of a message must be an array")
        message["tool_calls"] = [_tool_call(call, control_tokens) for call in calls]
    if role == "tool":
        if name := text("tool_name"):
            message["tool_name"] = message["name"] = name
        if call_id := text("tool_call_id"):
            message["tool_call_id"] = call_id
    return message


def _tool_call(raw: Any, control_tokens: _ControlTokens) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequest("a tool call needs a function with a name")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"arguments of the tool call {name[:80]!r} must be an object")
    return {
        "type": "function",
        "id": control_tokens.guard(str(raw.get("id") or "")),
        "function": {
            "name": control_tokens.guard(name),
            "arguments": JsonObject(control_tokens.guard_all(arguments)),
        },
    }


def _is_plain(message: ChatMessage) -> bool:
    return message["role"] != "tool" and "tool_calls" not in message


def _joined(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Join neighbours of one role with a blank line; each tool call and result stays alone."""
    joined: list[ChatMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last and last["role"] == message["role"] and _is_plain(last) and _is_plain(message):
            texts = {
                key: "\n\n".join(filter(None, (last.get(key), message.get(key))))
                for key in last | message
            }
            joined[-1] = {**texts, "role": message["role"]}
        else:
            joined.append(message)
    return joined


def _with_nine_digit_ids(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Number the tool calls: Mistral's templates refuse ids of any other form."""
    ids: dict[str, str] = {}
    unanswered: list[str] = []
    renumbered = []
    for message in messages:
        if calls := message.get("tool_calls"):
            unanswered = [f"{len(ids) + n:09}" for n in range(len(calls))]
            ids |= {call["id"] or new: new for call, new in zip(calls, unanswered, strict=True)}
            calls = [{**call, "id": new} for call, new in zip(calls, unanswered, strict=True)]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            by_order = unanswered.pop(0) if unanswered else "0" * 9
            call_id = ids.get(message.get("tool_call_id", ""), by_order)
            message = {**message, "tool_call_id": call_id}
        renumbered.append(message)
    return renumbered


def _with_user_in_tool_result(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Add a user's message to the tool result before it.

    Agents put a reminder there, which templates that want an assistant in between refuse.
    """
    moved: list[ChatMessage] = []
    for message in messages:
        if message["role"] == "user" and moved and moved[-1]["role"] == "tool":
            content = f"{moved[-1]['content']}\n\n{message['content']}"
            moved[-1] = {**moved[-1], "content": content}
        else:
            moved.append(message)
    return moved


def _with_system_as_user(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Make system messages part of the user's that follow them."""
    return _joined(
        {**message, "role": "user"} if message["role"] == "system" else message
        for message in messages
    )


_REMEDIES: tuple[Callable[[list[ChatMessage]], list[ChatMessage]], ...] = (
    _with_nine_digit_ids,
    _with_user_in_tool_result,
    _with_system_as_user,
)


class _ControlTokens:
    """Finds the texts of control tokens in a user's text and keeps them from being parsed.

    They are put between marks before the template sees them, and become segments of their own
    after it. So are the parts that could become a control token beside other text: its beginning
    at the end of a string, and all of it but brackets (`|im_end|` as a parameter's name, for a
    template that writes `<` and `>` around names). Only a template that writes letters of a
    token around a user's text would still complete one.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(filter(None, texts))
        self._heads = frozenset(text[:n] for text in self._texts for n in range(1, len(text)))
        self._tails = frozenset(
            text[n:]
            for text in self._texts
            for n in range(1, len(text) - len(text.lstrip(_BRACKETS)) + 1)
        ) - {""}
        self._cores = frozenset(text.strip(_BRACKETS) for text in self._texts) - {""}
        self._starts = frozenset(text[:2] for text in self._texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def guard(self, text: str, spared: frozenset[str] = frozenset()) -> str:
        """Return text with marks around all that is or could become a control token.

        Marks in text itself are removed. Control tokens in spared are left as they are.
        """
        if not text.isascii():
            text = _MARKS.sub("", text)
        if not text.isidentifier() and text.strip(_BRACKETS) in self._cores and text not in spared:
            return f"{_OPEN}{text}{_CLOSE}"
        longest = self._lengths[0] if self._lengths else 0
        done = next((n for n in range(longest - 1, 0, -1) if text[:n] in self._tails), 0)
        parts = [_OPEN, text[:done], _CLOSE] if done else []
        for match in self._first.finditer(text):
            start = match.start()
            if start < done:
                continue
            token = self._token_at(text, start)
            if not token and start > len(text) - longest and text[start:] in self._heads:
                token = text[start:]
            if token and token not in spared:
                parts += [text[done:start], _OPEN, token, _CLOSE]
                done = start + len(token)
        return "".join(parts) + text[done:] if parts else text

    def guard_all(self, value: Any) -> Any:
        """Return a copy of a JSON value with every string in it guarded."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self.guard(str(key)): self.guard_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guard_all(item) for item in value]
        return value

    def segments(self, text: str) -> tuple[Segment, ...]:
        """Split text at the marks; neighbours are never of the same trust."""
        trusted, *marked = _SURROGATES.sub("\ufffd", text).split(_OPEN)
        pieces = [(trusted, True)]
        for piece in marked:
            untrusted, is_closed, trusted = piece.partition(_CLOSE)
            if not is_closed:  # the template cut the text off behind the control token
                untrusted = self._token_at(piece, 0)
                trusted = piece[len(untrusted) :]
            pieces += [(untrusted, False), (trusted, True)]
        clean = [(text, trust) for piece, trust in pieces if (text := piece.replace(_CLOSE, ""))]
        return tuple(
            Segment("".join(text for text, _ in run), trust)
            for trust, run in groupby(clean, key=itemgetter(1))
        )

    def _token_at(self, text: str, start: int) -> str:
        """Return the longest control token that begins at start, or nothing."""
        if text[start : start + 2] not in self._starts:  # most "<" are none
            return ""
        candidates = (text[start : start + n] for n in self._lengths)
        return next((token for token in candidates if token in self._texts), "")
