"""When the context is full, too short, of another size, or short of cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as llama_cpp
import pytest
import tiny_models
from driver import Answer, Driver, assert_all_same

from headrace.engine.messages import ContextChanged, Done, Event, Failed

TINY = ["tiny_llama", "tiny_gemma", "tiny_mamba"]
Open = Callable[..., Driver]
N_CTX = 256


def shifted(tokens: list[int], n_keep: int) -> list[int]:
    """Return what is left of a full context: its beginning, and the newer half of the rest."""
    n_drop = (len(tokens) - n_keep) // 2
    return tokens[:n_keep] + tokens[n_keep + n_drop :]


# ---- full ----


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("n_keep", "n_kept"), [(4, 5), (0, 1), (60, 61), (-1, 100)])
def test_after_a_shift_an_answer_is_that_to_a_fresh_prompt_of_what_is_left(
    name: str, n_keep: int, n_kept: int, open_engine: Open
) -> None:
    answer = open_engine(name, n_ctx=N_CTX).ask(
        tiny_models.prompt(100), n_predict=400, n_keep=n_keep
    )
    assert (answer.timings.n_generated, answer.reason) == (400, "length")
    n_left, tokens = 400, tiny_models.prompt(100)
    while n_left:
        n = min(n_left, N_CTX - len(tokens))
        part = open_engine(name, n_slots=1).ask(tokens, n_predict=n, wants_context=True)
        assert part.timings.n_generated == n
        same = answer.part(400 - n_left, n)
        same.assert_same(part)
        if same.text != part.text:
            break  # at a choice that rounding may turn; what follows is another answer
        n_left -= n
        tokens = shifted(part.tokens, n_kept)


@pytest.mark.parametrize("name", TINY)
def test_without_shifts_an_answer_ends_where_the_context_does(name: str, open_engine: Open) -> None:
    driver = open_engine(name, n_ctx=N_CTX)
    answer = driver.ask(tiny_models.prompt(100), n_predict=400, shifts=False)
    assert (answer.timings.n_generated, answer.reason) == (N_CTX - 100, "length")


@pytest.mark.parametrize("name", TINY)
def test_all_slots_may_fill_their_contexts_at_once(name: str, open_engine: Open) -> None:
    several = [tiny_models.prompt(100 + i, seed=i) for i in range(4)]
    alone = [open_engine(name, n_slots=1).ask(p, n_predict=N_CTX - len(p)) for p in several]
    driver = open_engine(name, n_ctx=N_CTX, n_slots=4)
    answers = [driver.submit(p, n_predict=-1, shifts=False) for p in several]
    driver.run()
    assert_all_same(answers, alone)


# ---- prompts that are too long ----


def test_a_prompt_must_leave_room_for_one_token(open_engine: Open) -> None:
    driver = open_engine("tiny_llama", n_ctx=N_CTX)
    fits = driver.ask(tiny_models.prompt(N_CTX - 1), n_predict=5, shifts=False)
    assert fits.timings.n_generated == 1
    failed = driver.ask(tiny_models.prompt(N_CTX)).failed
    assert failed is not None
    assert (failed.kind, failed.status) == ("PromptTooLong", 400)
    assert (failed.n_prompt, failed.n_ctx) == (N_CTX, N_CTX)


def test_a_prompt_that_fails_leaves_the_others_as_they_are(open_engine: Open) -> None:
    expected = open_engine("tiny_llama").ask(tiny_models.prompt(50))
    driver = open_engine("tiny_llama", n_ctx=N_CTX)
    good, bad = driver.submit(tiny_models.prompt(50)), driver.submit(tiny_models.prompt(300))
    driver.run()
    good.assert_same(expected)
    assert bad.failed is not None


@pytest.mark.parametrize(("n_keep", "n_kept"), [(4, 5), (60, 61), (-1, N_CTX - 2)])
def test_a_prompt_may_be_cut_in_its_middle(n_keep: int, n_kept: int, open_engine: Open) -> None:
    prompt = tiny_models.prompt(700)
    answer = open_engine("tiny_llama", n_ctx=N_CTX).ask(
        prompt, n_predict=-2, n_keep=n_keep, truncates=True
    )
    n_prompt = N_CTX - max((N_CTX - n_kept) // 2, 1)
    assert answer.n_prompt == answer.timings.n_prompt == n_prompt
    cut = prompt[:n_kept] + prompt[700 - (n_prompt - n_kept) :]
    answer.assert_same(open_engine("tiny_llama").ask(cut, n_predict=N_CTX - n_prompt))


def test_a_prompt_is_not_cut_for_a_request_that_does_not_shift(open_engine: Open) -> None:
    driver = open_engine("tiny_llama", n_ctx=N_CTX)
    failed = driver.ask(tiny_models.prompt(300), truncates=True, shifts=False).failed
    assert failed is not None and failed.kind == "PromptTooLong"


def test_a_prompt_without_tokens_is_refused(open_engine: Open) -> None:
    failed = open_engine("tiny_llama").ask([]).failed
    assert failed is not None and (failed.kind, failed.status) == ("InvalidRequest", 400)


# ---- another size ----


def record(driver: Driver) -> list[Event]:
    events: list[Event] = []
    driver.on_event = events.append
    return events


def ended(answer: Answer) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Done | Failed) and event.uid == answer.uid


def position(events: list[Event], is_it: Callable[[Event], bool]) -> int:
    return next(i for i, event in enumerate(events) if is_it(event))


def test_another_context_waits_for_the_running_and_then_serves_all(open_engine: Open) -> None:
    driver = open_engine("tiny_llama", n_ctx=512)
    events = record(driver)
    prompt = tiny_models.prompt(50)
    first = driver.submit(prompt, n_predict=60)
    driver.turn()
    second = driver.submit(prompt, n_ctx=N_CTX, n_predict=30)
    third = driver.submit(prompt, n_predict=30)
    driver.run()
    changed = position(events, lambda event: isinstance(event, ContextChanged))
    assert position(events, ended(first)) < changed < position(events, ended(second))
    assert driver.contexts == [N_CTX]
    assert driver.engine.n_ctx == N_CTX
    assert_all_same([second, third], [first.part(0, 30)] * 2)


def test_the_size_that_is_there_already_changes_nothing(open_engine: Open) -> None:
    driver = open_engine("tiny_llama", n_ctx=N_CTX)
    driver.ask(tiny_models.prompt(50), n_ctx=N_CTX)
    assert driver.contexts == []


def test_a_prompt_that_was_accepted_gets_the_context_it_was_accepted_for(
    open_engine: Open,
) -> None:
    expected = open_engine("tiny_llama").ask(tiny_models.prompt(400))
    driver = open_engine("tiny_llama", n_ctx=512, n_slots=1)
    driver.submit(tiny_models.prompt(50))
    driver.submit(tiny_models.prompt(50), n_ctx=N_CTX)
    long = driver.submit(tiny_models.prompt(400))
    driver.run()
    long.assert_same(expected)
    assert driver.contexts == [N_CTX, 512]


def test_a_context_that_can_not_be_made_fails_its_request_alone(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = open_engine("tiny_llama", n_ctx=512)
    real = llama_cpp.llama_init_from_model

    def init(model: Any, params: Any) -> Any:
        return None if params.n_ctx == 4 * 1024 else real(model, params)

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", init)
    expected = driver.ask(tiny_models.prompt(50))
    refused = driver.submit(tiny_models.prompt(50), n_ctx=1024)
    other = driver.submit(tiny_models.prompt(50))
    driver.run()
    assert refused.failed is not None and refused.failed.kind == "ModelUnusable"
    other.assert_same(expected)
    assert (driver.engine.n_ctx, driver.contexts) == (512, [])


# ---- fewer cells than contexts ----


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma"])
@pytest.mark.parametrize("n_prompt", [30, 180, 400])
def test_sequences_that_run_out_of_cells_take_turns(
    name: str, n_prompt: int, open_engine: Open
) -> None:
    several = [tiny_models.prompt(n_prompt + i, seed=i) for i in range(4)]
    alone = [open_engine(name).ask(prompt, n_predict=110) for prompt in several]
    driver = open_engine(name, n_ctx=512, n_slots=4, n_cells=512)
    answers = [driver.submit(prompt, n_predict=110) for prompt in several]
    n_turns = 0
    while not all(answer.has_ended for answer in answers):
        driver.turn()
        n_turns += 1
        assert n_turns < 4 * (110 + 400 // 64)
    assert_all_same(answers, alone)


def test_a_sequence_that_gave_up_its_cells_can_be_cancelled(open_engine: Open) -> None:
    several = [tiny_models.prompt(200, seed=i) for i in range(3)]
    driver = open_engine("tiny_llama", n_ctx=512, n_slots=3, n_cells=512)
    alone = [open_engine("tiny_llama").ask(prompt, n_predict=150) for prompt in several[:2]]
    answers = [driver.submit(prompt, n_predict=150) for prompt in several]
    while len(answers[0].text) < 80:
        driver.turn()
    driver.cancel(answers[2])
    driver.run()
    assert_all_same(answers[:2], alone)
