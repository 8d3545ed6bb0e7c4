"""Which answers tell how fast a model decodes, and what is said of them."""

from __future__ import annotations

import logging

import pytest

from headrace.engine.pace import N_TOKENS, Answer, Pace, Prompt

S = 10**9


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


def answer(pace: Pace, clock: Clock, uid: int, step_s: float, n_tokens: int = N_TOKENS) -> None:
    pace.start(uid, 100)
    for _ in range(n_tokens - 1):
        clock.now_ns += int(step_s * S)
        pace.step(uid)


def speed(pace: Pace) -> float:
    assert pace.median is not None
    return pace.median.tokens_per_s


def test_what_was_read_is_that_of_the_median_answer(clock: Clock) -> None:
    n_read = 10**9
    pace = Pace(clock=clock, bytes_read=lambda: n_read)
    for uid, (step_s, n_bytes) in enumerate([(0.5, 300), (0.25, 200), (0.125, 100)]):
        pace.start(uid, 100)
        for _ in range(N_TOKENS - 1):
            clock.now_ns += int(step_s * S)
            n_read += n_bytes
            pace.step(uid)
        n_read += 77  # between answers
    assert pace.median is not None
    assert pace.median == Answer(pace.median.tokens_per_s, 200, 132)
    assert speed(pace) == pytest.approx(4)


def test_an_answer_is_as_fast_as_its_steps(clock: Clock) -> None:
    pace = Pace(clock=clock)
    clock.now_ns = 17 * S
    answer(pace, clock, 1, 0.25, N_TOKENS - 1)
    assert pace.median is None  # too short
    answer(pace, clock, 2, 0.25)
    assert speed(pace) == pytest.approx(4)


def test_what_comes_after_the_first_tokens_does_not_count(clock: Clock) -> None:
    pace = Pace(clock=clock)
    answer(pace, clock, 1, 0.25)
    for _ in range(2 * N_TOKENS):
        clock.now_ns += 9 * S
        pace.step(1)
    assert speed(pace) == pytest.approx(4)


def test_answers_that_were_interrupted_or_never_begun_do_not_count(clock: Clock) -> None:
    pace = Pace(clock=clock)
    pace.start(1, 100)
    for i in range(2 * N_TOKENS):
        clock.now_ns += S
        if i == N_TOKENS // 2:
            pace.interrupt()
        pace.step(1)
        pace.step(2)
    assert pace.median is None


def test_chunks_of_a_prompt_are_one_prompt_if_nothing_comes_between(clock: Clock) -> None:
    pace = Pace(clock=clock)
    for _ in range(3):
        pace.interrupt(1)
        pace.prefill(100, 0.5)
    pace.start(1, 100)
    assert list(pace.prompts) == [Prompt(300, 1.5)]
    for between in (None, 3):
        pace.interrupt(2)
        pace.prefill(400, 1.0)
        pace.interrupt(between)
        pace.interrupt(2)
        pace.prefill(256, 2.0)
        pace.start(2, 100)
    assert list(pace.prompts[1:]) == [Prompt(256, 2.0)] * 2


def test_short_prompts_and_those_of_other_answers_do_not_count(clock: Clock) -> None:
    pace = Pace(clock=clock)
    pace.interrupt(1)
    pace.prefill(255, 1.0)
    pace.start(1, 100)
    pace.start(1, 100)
    pace.interrupt(2)
    pace.prefill(512, 1.0)
    pace.start(3, 100)
    assert pace.prompts == ()


def test_the_median_of_answers_counts_and_the_first_is_told(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pace = Pace(5.0, clock)
    for uid, step_s in enumerate((0.25, 20.0, 0.5, 0.125, 0.25)):
        answer(pace, clock, uid, step_s)
    assert speed(pace) == pytest.approx(4)
    assert caplog.messages == ["uid 0: 64 tokens at 4 tokens/s, the forecast was 5"]


def test_without_a_forecast_nothing_is_told(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answer(Pace(clock=clock), clock, 1, 0.25)
    assert not caplog.messages
