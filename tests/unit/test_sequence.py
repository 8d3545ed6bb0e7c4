"""The life of a sequence, its limits and what it counts."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.messages import Generate
from headrace.engine.sequence import MAX_SAME_PIECES, NEXT, Sequence, State

EVENTS = sorted({event for _, event in NEXT})


def sequence(n_prompt: int = 3, n_ctx: int = 64, n_predict: int = -1) -> Sequence:
    return Sequence(
        Generate(uid=7, prompt=(), n_predict=n_predict), list(range(n_prompt)), n_ctx
    )  # fmt: skip


@pytest.mark.parametrize(("state", "event"), list(product(State, EVENTS)))
def test_a_sequence_moves_only_as_its_table_says(state: State, event: str) -> None:
    moved = sequence()
    moved.state = state
    if (state, event) in NEXT:
        moved.move(event)
        assert moved.state is NEXT[state, event]
    else:
        with pytest.raises(KeyError):
            moved.move(event)


def test_every_state_but_the_last_can_finish() -> None:
    can_finish = {state for state, event in NEXT if event == "finish"}
    assert can_finish == set(State) - {State.FINISHED}


@pytest.mark.parametrize(
    ("asked", "n_predict"), [(5, 5), (0, 0), (-1, 640), (-7, 640), (10_000, 640), (-2, 61)]
)
def test_how_many_tokens_a_request_may_generate(asked: int, n_predict: int) -> None:
    assert sequence(n_prompt=3, n_ctx=64, n_predict=asked).n_predict == n_predict


def test_a_sequence_without_room_may_still_generate_one_token() -> None:
    assert sequence(n_prompt=64, n_ctx=64, n_predict=-2).n_predict == 1


def test_one_piece_too_many_of_the_same_is_a_runaway() -> None:
    repeating = sequence()
    told = [repeating.repeats(piece) for piece in [b"la", b" la", b"la\n"] * MAX_SAME_PIECES]
    assert told.index(True) == MAX_SAME_PIECES


def test_another_piece_starts_the_count_of_repetitions_anew() -> None:
    varying = sequence()
    pieces = ([b"a"] * MAX_SAME_PIECES + [b"b"]) * 3
    assert not any([varying.repeats(piece) for piece in pieces])


def test_a_cut_keeps_the_beginning_and_the_newer_half_of_the_rest() -> None:
    cut = sequence(n_prompt=12, n_ctx=12)
    cut.n_past = 11
    cut.cut(n_keep=2)
    assert cut.tokens == [0, 1, 7, 8, 9, 10, 11]
    assert cut.n_past == 0


@given(st.integers(4, 200), st.integers(0, 300))
def test_a_cut_makes_room_whatever_is_to_be_kept(n_ctx: int, n_keep: int) -> None:
    cut = sequence(n_prompt=n_ctx, n_ctx=n_ctx)
    cut.cut(n_keep)
    n_kept = min(n_keep, n_ctx - 2)
    assert n_kept < len(cut.tokens) < n_ctx
    assert cut.tokens[:n_kept] == list(range(n_kept))
    n_rest = len(cut.tokens) - n_kept
    assert cut.tokens[n_kept:] == list(range(n_ctx))[-n_rest:]


def test_times_are_those_of_waiting_prefill_and_decode() -> None:
    now = iter([100, 130, 200, 1000])  # made, admitted, first token, finished
    timed = Sequence(Generate(uid=7, prompt=()), [1, 2, 3], 64, clock=lambda: next(now))
    timed.move("admit")
    timed.append(4)
    timings = timed.timings()
    assert (timings.queue_ns, timings.prefill_ns, timings.decode_ns) == (30, 70, 800)
    assert (timings.n_prompt, timings.n_generated) == (3, 1)


def test_a_preempted_sequence_was_admitted_when_it_first_was() -> None:
    now = iter([0, 5, 50, 60])
    timed = Sequence(Generate(uid=7, prompt=()), [1], 64, clock=lambda: next(now))
    timed.move("admit")
    timed.move("preempt")
    timed.move("admit")
    timed.append(2)
    assert timed.timings().queue_ns == 5


def test_tokens_that_are_not_evaluated_are_those_past_the_evaluated_ones() -> None:
    growing = sequence(n_prompt=5)
    growing.n_past = 5
    growing.append(9)
    assert (growing.n_unevaluated, growing.tokens[-1], growing.n_generated) == (1, 9, 1)
