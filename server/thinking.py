"""Tells a model's thinking from its answer, in text that comes in pieces.

In: chunks of generated text. Out: what of each is thinking and what is content. Knows the tags
that Qwen's and DeepSeek's models write, no model and no request.
"""

from __future__ import annotations

import enum

OPEN, CLOSE = "<think>", "</think>"


class _Part(enum.Enum):
    START = "start"
    THINKING = "thinking"
    CONTENT = "content"


class ThinkingSplitter:
    """Splits one answer: a think tag may open it, and all up to the closing tag is thinking.

    Blanks around the tags belong to neither. A tail that may be the beginning of a tag is held
    back until it is certain.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        """Begin an answer; is_open says that the prompt has written the opening tag already."""
        self._part = _Part.THINKING if is_open else _Part.START
        self._held = ""
        self._skips_blanks = is_open

    def push(self, text: str) -> tuple[str, str]:
        """Return the thinking and the content that text makes certain."""
        text = self._held + text
        self._held = ""
        if self._part is _Part.START:
            begun = text.lstrip()
            if begun.startswith(OPEN):
                self._enter(_Part.THINKING)
                text = begun.removeprefix(OPEN)
            elif OPEN.startswith(begun):
                self._held = text
                return "", ""
            else:
                self._part = _Part.CONTENT
        if self._part is _Part.CONTENT:
            return "", self._without_blanks(text)
        thinking, tag, rest = text.partition(CLOSE)
        if not tag:
            n_held = _n_open(thinking)
            self._held = thinking[len(thinking) - n_held :]
            return self._without_blanks(thinking[: len(thinking) - n_held]), ""
        thinking = self._without_blanks(thinking)
        self._enter(_Part.CONTENT)
        return thinking, self._without_blanks(rest)

    def finish(self) -> tuple[str, str]:
        """Return what was still held back at the end of the answer."""
        held, self._held = self._held, ""
        return (held, "") if self._part is _Part.THINKING else ("", held)

    def _enter(self, part: _Part) -> None:
        self._part, self._skips_blanks = part, True

    def _without_blanks(self, text: str) -> str:
        if not self._skips_blanks:
            return text
        text = text.lstrip()
        self._skips_blanks = not text
        return text


def _n_open(text: str) -> int:
    """Return the length of the longest tail of text that begins a closing tag."""
    return next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
