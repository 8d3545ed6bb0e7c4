"""Where BOS comes from, and what of a prompt may spell control tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.engine.errors import InvalidRequest
from headrace.engine.messages import Generate, Segment
from headrace.engine.prompt import prompt_tokens, tokenize_segments

BOS = 256


class ByteVocab:
    """Bytes are tokens; "<s>" spells BOS where control tokens are parsed."""

    bos = BOS

    def __init__(self, *, adds_bos: bool) -> None:
        self.adds_bos = adds_bos

    def tokenize(self, text: str, *, parses_control: bool) -> list[int]:
        if not parses_control:
            return list(text.encode())
        first, *rest = text.split("<s>")
        tokens = list(first.encode())
        for part in rest:
            tokens += [BOS, *part.encode()]
        return tokens

    def contains(self, tokens: Sequence[int]) -> bool:
        return all(0 <= token <= BOS for token in tokens)


ADDING, PLAIN = ByteVocab(adds_bos=True), ByteVocab(adds_bos=False)
A, B = ord("a"), ord("b")


@pytest.mark.parametrize("text", ["a", "<s>a", "<s><s>a"])
def test_a_vocabulary_that_adds_bos_gets_exactly_one(text: str) -> None:
    assert tokenize_segments(ADDING, [Segment(text, True)]) == [BOS, A]


@pytest.mark.parametrize(
    ("text", "tokens"), [("a", [A]), ("<s>a", [BOS, A]), ("<s><s>a", [BOS, BOS, A])]
)
def test_a_vocabulary_that_adds_none_leaves_the_text_as_it_is(text: str, tokens: list[int]) -> None:
    assert tokenize_segments(PLAIN, [Segment(text, True)]) == tokens


def test_bos_inside_a_prompt_stays() -> None:
    assert tokenize_segments(ADDING, [Segment("a<s>b", True)]) == [BOS, A, BOS, B]


def test_user_text_can_not_spell_control_tokens() -> None:
    segments = [Segment("<s>", True), Segment("<s>", False)]
    assert tokenize_segments(PLAIN, segments) == [BOS, *b"<s>"]


def test_segments_follow_each_other() -> None:
    segments = [Segment("a", True), Segment("b", False), Segment("a", True)]
    assert tokenize_segments(PLAIN, segments) == [A, B, A]


def test_an_empty_prompt_is_bos_alone_or_nothing() -> None:
    assert tokenize_segments(ADDING, []) == [BOS]
    assert tokenize_segments(PLAIN, []) == []


def test_a_prompt_after_a_context_gets_no_bos() -> None:
    request = Generate(uid=1, prompt=(Segment("<s>a", True),), prefix_tokens=(BOS, B))
    assert prompt_tokens(ADDING, request) == [BOS, B, A]


@pytest.mark.parametrize("token", [-1, BOS + 1])
def test_a_context_with_unknown_ids_is_refused(token: int) -> None:
    request = Generate(uid=1, prompt=(Segment("a", True),), prefix_tokens=(B, token))
    with pytest.raises(InvalidRequest, match="token ids"):
        prompt_tokens(ADDING, request)
