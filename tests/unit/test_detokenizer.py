"""Text comes out at once, whole characters only, and nothing of a stop string ever leaves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.detokenizer import Detokenizer


def stream(detokenizer: Detokenizer, pieces: Iterable[bytes]) -> list[str]:
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


def cut_at_stop(text: str, stop: Iterable[str]) -> str:
    """Return text up to the stop string that is whole first; of two that end there, the longer."""
    found = [(at + len(s), at) for s in stop if s and (at := text.find(s)) >= 0]
    return text[: min(found)[1]] if found else text


def in_pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(ends)]


# Few letters, so that stop strings are met, overlap and nearly happen; one character of each width.
texts = st.text("abé€🙂", max_size=24)
stops = st.lists(st.text("abé🙂", max_size=4), max_size=3)
cuts = st.lists(st.integers(0, 100), max_size=30)


@given(texts, stops, cuts)
def test_joined_text_is_the_whole_text_cut_at_the_first_stop(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(stop)
    sent = stream(detokenizer, in_pieces(text.encode(), cuts))
    assert "".join(sent) == cut_at_stop(text, stop)
    assert detokenizer.is_stopped == (cut_at_stop(text, stop) != text)


@given(texts, stops, cuts)
def test_no_part_of_a_stop_string_is_ever_sent(text: str, stop: list[str], cuts: list[int]) -> None:
    detokenizer = Detokenizer(stop)
    expected, sent = cut_at_stop(text, stop), ""
    for piece in in_pieces(text.encode(), cuts):
        sent += detokenizer.push(piece)
        assert expected.startswith(sent)


@given(st.binary(max_size=40), cuts)
def test_bytes_that_are_no_utf8_become_replacement_characters(data: bytes, cuts: list[int]) -> None:
    sent = stream(Detokenizer(), [*in_pieces(data, cuts), b"."])
    assert "".join(sent) == (data + b".").decode(errors="replace")


def test_without_stop_strings_every_whole_character_is_sent_at_once() -> None:
    assert stream(Detokenizer(), [b"one", b" two"]) == ["one", " two", ""]


def test_bytes_of_an_unfinished_character_wait_for_the_rest() -> None:
    first, rest = "🙂".encode()[:3], "🙂".encode()[3:]
    assert stream(Detokenizer(), [b"a" + first, rest + b"b"]) == ["a", "🙂b", ""]


def test_a_character_cut_by_the_end_is_dropped() -> None:
    assert "".join(stream(Detokenizer(), [b"a", "🙂".encode()[:2]])) == "a"


def test_a_tail_that_turns_out_to_be_no_stop_string_is_sent() -> None:
    assert stream(Detokenizer(["<end>"]), [b"a <e", b"nd of it"]) == ["a ", "<end of it", ""]


def test_a_tail_that_may_begin_a_stop_string_is_sent_at_the_end() -> None:
    assert stream(Detokenizer(["<end>"]), [b"a <en"]) == ["a ", "<en"]


def test_nothing_is_sent_after_a_stop_string() -> None:
    detokenizer = Detokenizer(["."])
    assert stream(detokenizer, [b"one. two", b" three"]) == ["one", "", ""]
    assert detokenizer.is_stopped


@pytest.mark.parametrize("pieces", [[b"abcd"], [b"ab", b"cd"], [b"a", b"b", b"c", b"d"]])
def test_the_stop_string_that_is_whole_first_counts_however_text_comes(pieces: list[bytes]) -> None:
    assert "".join(stream(Detokenizer(["abcd", "bc"]), pieces)) == "a"


def test_an_empty_stop_string_stops_nothing() -> None:
    detokenizer = Detokenizer(["", "x"])
    assert "".join(stream(detokenizer, [b"abc"])) == "abc"
    assert not detokenizer.is_stopped
