"""What of an answer goes to stdout and what to stderr, and how its cost is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.engine.messages import Timings
from headrace.server.commands.answers import describe, show
from headrace.server.commands.chat_session import Cost, Piece

THOUGHT = [Piece("h", is_thinking=True), Piece("m", is_thinking=True)]
SAID = [Piece("Yes", is_thinking=False), Piece(".", is_thinking=False)]


def test_answer_goes_to_stdout_and_thinking_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    show(THOUGHT + SAID, is_coloured=False)
    assert capsys.readouterr() == ("Yes.\n", "Thinking...\nhm\n...done thinking.\n\n")


def test_answer_that_ends_its_line_gets_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    show([Piece("Yes.\n", is_thinking=False)], is_coloured=False)
    assert capsys.readouterr().out == "Yes.\n"


def test_interrupted_answer_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Iterator[Piece]:
        yield SAID[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show(interrupted(), is_coloured=False)
    assert capsys.readouterr().out == "Yes\n"


def test_terminal_is_left_in_its_own_colour(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Iterator[Piece]:
        yield from THOUGHT
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show(interrupted(), is_coloured=True)
    output = capsys.readouterr()
    assert (output.out, output.err.count("\x1b[2m"), output.err.count("\x1b[0m")) == ("", 1, 1)
    assert output.err.index("\x1b[2m") < output.err.index("hm") < output.err.index("\x1b[0m")


def test_cost_is_told_as_ollama_tells_it() -> None:
    timings = Timings(
        n_prompt=50, n_cached=40, n_generated=30, queue_ns=1, prefill_ns=500_000_000,
        decode_ns=2_000_000_000,
    )  # fmt: skip
    assert describe(Cost(2_600_000_000, timings), load_ns=400_000_000) == (
        "total duration:       3s\n"
        "load duration:        0.4s\n"
        "prompt eval count:    50 token(s)\n"
        "prompt eval cached:   40 token(s)\n"
        "prompt eval duration: 0.5s\n"
        "prompt eval rate:     20.00 tokens/s\n"
        "eval count:           30 token(s)\n"
        "eval duration:        2s\n"
        "eval rate:            15.00 tokens/s"
    )
