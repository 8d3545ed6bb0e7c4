"""Thinking and answer are told apart, wherever the pieces of text begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.thinking import ThinkingSplitter


def split(pieces: Sequence[str], *, is_open: bool = False) -> tuple[str, str]:
    """Return all thinking and all content of pieces."""
    splitter = ThinkingSplitter(is_open=is_open)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(thinking for thinking, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        ("just text", "", "just text"),
        ("<think>a</think>b", "a", "b"),
        ("\n<think>\na b\n</think>\n\nc\n", "a b\n", "c\n"),
        ("<think></think>c", "", "c"),
        ("<think>never closed </thin", "never closed </thin", ""),
        ("  <thin", "", "  <thin"),
        ("text <think>a</think>", "", "text <think>a</think>"),
        ("<think>a</think>b</think><think>", "a", "b</think><think>"),
        ("<think>a < b </ c</think>d", "a < b </ c", "d"),
        ("", "", ""),
    ],
)
def test_tags_at_the_start_set_thinking_off(text: str, thinking: str, content: str) -> None:
    assert split([text]) == (thinking, content)


def test_prompt_that_opened_the_thinking_leaves_only_its_end_to_find() -> None:
    assert split(["\na", "b</th", "ink>", "\n", "\nc "], is_open=True) == ("ab", "c ")


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "</", "<", "a", " ", "\n", "nk>"])),
    st.booleans(),
    st.data(),
)
def test_text_is_split_alike_in_whatever_pieces_it_comes(
    words: list[str], is_open: bool, data: st.DataObject
) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    ends = zip([0, *cuts], [*cuts, len(text)], strict=True)
    assert split([text[a:b] for a, b in ends], is_open=is_open) == split([text], is_open=is_open)


def test_what_is_certain_is_not_held_back() -> None:
    splitter = ThinkingSplitter()
    assert splitter.push("<think>abc") == ("abc", "")
    assert splitter.push("def</") == ("def", "")
    assert splitter.push("think>g") == ("", "g")
    assert splitter.push("h<think>") == ("", "h<think>")
