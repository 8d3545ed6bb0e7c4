"""Answers on a terminal or in a pipe: the text to stdout as it comes, all else to stderr.

In: the pieces of an answer, and what it took. Knows no engine and no conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from headrace.config.units import format_duration
from headrace.server.commands.chat_session import Cost, Piece

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def show(pieces: Iterable[Piece], *, is_coloured: bool) -> None:
    """Write pieces as they come, thinking to stderr, and end the line that the answer ends in.

    An answer that is interrupted ends its line too.
    """
    dim, plain = (_DIM, _PLAIN) if is_coloured else ("", "")
    is_thinking = False
    last = ""
    try:
        for piece in pieces:
            if piece.is_thinking != is_thinking:
                is_thinking = piece.is_thinking
                _write(sys.stderr, f"{dim}Thinking...\n" if is_thinking else _thought(plain))
            _write(sys.stderr if is_thinking else sys.stdout, piece.text)
            last = piece.text[-1:]
    finally:
        if is_thinking:
            _write(sys.stderr, _thought(plain))
        elif last != "\n":
            _write(sys.stdout, "\n")


def describe(cost: Cost, load_ns: int) -> str:
    """Return what an answer took, a line each, as `ollama run --verbose` has it.

    load_ns is the load that the answer had to wait for, 0 if none. The rate of the prompt is of
    the tokens that were evaluated, those reused from the KV cache aside.
    """
    timings = cost.timings
    n_evaluated = timings.n_prompt - timings.n_cached
    rows = [("total duration", _seconds(cost.total_ns + load_ns))]
    if load_ns:
        rows.append(("load duration", _seconds(load_ns)))
    rows.append(("prompt eval count", f"{timings.n_prompt} token(s)"))
    if timings.n_cached:
        rows.append(("prompt eval cached", f"{timings.n_cached} token(s)"))
    rows += [
        ("prompt eval duration", _seconds(timings.prefill_ns)),
        ("prompt eval rate", f"{n_evaluated / timings.prefill_ns * 1e9:.2f} tokens/s"),
        ("eval count", f"{timings.n_generated} token(s)"),
        ("eval duration", _seconds(timings.decode_ns)),
        ("eval rate", f"{timings.n_generated / timings.decode_ns * 1e9:.2f} tokens/s"),
    ]
    return "\n".join(f"{name + ':':21} {value}" for name, value in rows)


def _thought(plain: str) -> str:
    return f"{plain}\n...done thinking.\n\n"


def _seconds(duration_ns: int) -> str:
    return format_duration(duration_ns / 1e9)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
