"""A conversation with one model: messages and options in, pieces of answers out.

The prompt is made as /api/chat makes it, and so is the cut of one that has grown too long; that a
follow-up turn evaluates only what is new is the engine's doing. Knows no terminal.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from headrace.engine.chat import ChatTemplate
from headrace.engine.errors import InvalidRequest, PromptTooLong
from headrace.engine.library import Model
from headrace.engine.messages import Done, Segment, Timings, Token
from headrace.server.checks import check_model
from headrace.server.commands.local_engine import LocalEngine
from headrace.server.options import REQUEST, SAMPLING, number, parse
from headrace.server.prompts import Message, command, text_of, without_oldest
from headrace.server.schemas import AnswerBody
from headrace.server.thinking import OPEN, ThinkingSplitter

# What may be set between two answers; "stop" has texts, the others have one number.
PARAMETERS = (*SAMPLING, *REQUEST, "stop")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer, or of the thinking before it."""

    text: str
    is_thinking: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """What the last finished answer took; total_ns begins with the question."""

    total_ns: int
    timings: Timings


class ChatSession:
    """The messages so far, and the engine that answers the next."""

    def __init__(
        self, engine: LocalEngine, model: Model, parameters: dict[str, object], system: str
    ) -> None:
        """Begin a conversation; parameters are options of /api/chat, an empty system is none.

        Raises:
            InvalidRequest: the model can't chat, or a parameter is wrong.
        """
        self.system = system
        self.cost: Cost | None = None
        self.parameters = parameters
        self._options = parse(parameters)
        self._engine = engine
        self._body = AnswerBody(model=str(model.name))
        self._think = check_model(self._body, model, "chat", needs="", has_images=False)
        told = engine.loaded.message
        self._template = ChatTemplate(model.template, told.bos, told.eos, told.control_tokens)
        self._turns: list[Message] = []

    def set_parameter(self, name: str, values: Sequence[str]) -> None:
        """Set a parameter to what values, words of a command, spell.

        Raises:
            InvalidRequest: there is no such parameter, or it does not take these values.
        """
        if name not in PARAMETERS:
            raise InvalidRequest(f"unknown parameter {name!r}, expected {', '.join(PARAMETERS)}")
        if name != "stop" and len(values) != 1:
            raise InvalidRequest(f"parameter {name} has {len(values)} values, expected one number")
        value = list(values) if name == "stop" else _number_or_text(values[0])
        parameters = {**self.parameters, name: value}
        self._options = parse(parameters)
        self.parameters = parameters

    def clear(self) -> None:
        """Forget what was said; system message and parameters stay."""
        self._turns.clear()

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """Yield the answer to text as it comes.

        What has come of an answer that ends early stays in the conversation; a question to which
        nothing came leaves it.

        Raises:
            EngineError: there is no answer.
        """
        started = time.perf_counter_ns()
        self.cost = None
        self._turns.append({"role": "user", "content": text})
        answer = {True: "", False: ""}
        try:
            with closing(self._answer()) as parts:
                for part in parts:
                    if isinstance(part, Done):
                        self.cost = Cost(time.perf_counter_ns() - started, part.timings)
                    elif part.text:
                        answer[part.is_thinking] += part.text
                        yield part
        finally:
            self._remember(thinking=answer[True], content=answer[False])

    def _remember(self, *, thinking: str, content: str) -> None:
        if not content:
            self._turns.pop()
            return
        message = {"role": "assistant", "content": content}
        self._turns.append({**message, "thinking": thinking} if thinking else message)

    def _answer(self) -> Generator[Piece | Done, None, None]:
        """Yield the answer to all messages, or to as many of the newest as fit the context."""
        messages: list[Message] = list(self._turns)
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        prompt = self._render(messages)
        try:
            yield from self._generate(prompt)
        except PromptTooLong as error:
            if len(messages) == 1:
                raise
            n_ctx = error.n_ctx
        else:
            return

        def fits(n_dropped: int) -> bool:
            prompt = self._render(without_oldest(messages, n_dropped))
            return self._engine.count(prompt) < n_ctx

        n_dropped = 1 + bisect_left(range(1, len(messages) - 1), True, key=fits)
        yield from self._generate(self._render(without_oldest(messages, n_dropped)))

    def _render(self, messages: Sequence[Message]) -> tuple[Segment, ...]:
        return self._template.render(messages, None, self._think)

    def _generate(self, prompt: tuple[Segment, ...]) -> Iterator[Piece | Done]:
        request = command(self._body, self._options, self._engine.next_uid(), prompt)
        splitter = None
        if self._think:
            splitter = ThinkingSplitter(is_open=text_of(prompt).rstrip().endswith(OPEN))
        with closing(self._engine.generate(request)) as events:
            for event in events:
                yield from _pieces(splitter, event)
                if isinstance(event, Done):
                    yield event


def _pieces(splitter: ThinkingSplitter | None, event: Token | Done) -> Iterator[Piece]:
    """Yield the text of event, thinking and content apart if the model thinks."""
    if splitter is None:
        yield Piece(event.text, is_thinking=False)
        return
    parts = [splitter.push(event.text)]
    if isinstance(event, Done):
        parts.append(splitter.finish())
    for thinking, content in parts:
        yield Piece(thinking, is_thinking=True)
        yield Piece(content, is_thinking=False)


def _number_or_text(text: str) -> object:
    try:
        return number(text)
    except ValueError:
        return text  # which option it is wrong for, and what it takes, is said by parse
