"""What is in the KV cache is used again, and never changes an answer: cached is as good as cold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_models
from driver import TIE_QUANTISED, Driver, assert_all_same, song

CUTTABLE = ["tiny_llama", "tiny_gemma"]
TINY = [*CUTTABLE, "tiny_mamba"]
Open = Callable[..., Driver]


def words(driver: Driver, text: str) -> list[int]:
    vocab = driver.engine.vocab
    return [vocab.bos] * vocab.adds_bos + vocab.tokenize(text, parses_control=True)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("n_prompt", [20, 128, 500])
def test_a_second_turn_evaluates_only_what_is_new(
    name: str, n_prompt: int, open_engine: Open
) -> None:
    driver = open_engine(name)
    first = driver.ask(tiny_models.prompt(n_prompt), wants_context=True)
    second = [*first.tokens, *tiny_models.prompt(30, seed=1)[1:]]
    warm = driver.ask(second)
    assert warm.timings.n_cached == len(first.tokens) - 1  # the last one was never evaluated
    warm.assert_same(open_engine(name).ask(second))


@pytest.mark.parametrize(("name", "n_lines"), [("smollm2", 6), ("gemma3", 28)])
def test_a_second_turn_of_a_real_model_answers_as_a_cold_one(
    name: str, n_lines: int, open_engine: Open
) -> None:
    driver = open_engine(name)
    first = driver.ask(words(driver, song(1, n_lines)), n_predict=12, wants_context=True)
    assert len(first.tokens) > driver.engine.model.n_swa
    again = driver.engine.vocab.tokenize(song(1, 1), parses_control=True)
    warm = driver.ask([*first.tokens, *again], n_predict=12)
    assert warm.timings.n_cached == len(first.tokens) - 1
    cold = open_engine(name).ask([*first.tokens, *again], n_predict=12)
    warm.assert_same(cold, TIE_QUANTISED)


@pytest.mark.parametrize("name", CUTTABLE)
def test_the_same_prompt_again_evaluates_its_last_token(name: str, open_engine: Open) -> None:
    driver = open_engine(name)
    cold = driver.ask(tiny_models.prompt(300))
    warm = driver.ask(tiny_models.prompt(300))
    assert warm.timings.n_cached == 299
    warm.assert_same(cold)


@pytest.mark.parametrize("name", TINY)
def test_a_changed_tail_leaves_the_common_beginning(name: str, open_engine: Open) -> None:
    driver = open_engine(name)
    common = tiny_models.prompt(300)
    driver.ask(common + tiny_models.prompt(61, seed=1)[1:])
    changed = common + tiny_models.prompt(61, seed=2)[1:]
    warm = driver.ask(changed)
    if name == "tiny_mamba":  # goes on from the last snapshot, and those come every 32 tokens
        assert warm.timings.n_cached == 288
    else:
        assert 300 <= warm.timings.n_cached < 310
    warm.assert_same(open_engine(name).ask(changed))


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_changed_tail_of_a_real_models_prompt_answers_as_a_cold_one(
    name: str, open_engine: Open
) -> None:
    driver = open_engine(name)
    driver.ask(words(driver, song(1, 6) + song(2, 3)), n_predict=12)
    changed = words(driver, song(1, 6) + song(3, 3))
    warm = driver.ask(changed, n_predict=12)
    assert len(words(driver, song(1, 6))) - 2 <= warm.timings.n_cached < len(changed) - 60
    warm.assert_same(open_engine(name).ask(changed, n_predict=12), TIE_QUANTISED)


@pytest.mark.parametrize("name", TINY)
def test_four_conversations_that_take_turns_all_keep_their_prefixes(
    name: str, open_engine: Open
) -> None:
    driver = open_engine(name, n_slots=2)
    talks = [tiny_models.prompt(80 + 40 * i, seed=i) for i in range(4)]
    for turn in range(3):
        for i, talk in enumerate(talks):
            answer = driver.ask(talk, wants_context=True)
            if turn:
                assert answer.timings.n_cached == len(talk) - 30
            answer.assert_same(open_engine(name, n_slots=1).ask(talk))
            talks[i] = [*answer.tokens, *tiny_models.prompt(30, seed=9 + turn)[1:]]


@pytest.mark.parametrize("name", TINY)
def test_conversations_at_once_keep_their_prefixes(name: str, open_engine: Open) -> None:
    driver = open_engine(name, n_slots=4)
    talks = [tiny_models.prompt(80 + 40 * i, seed=i) for i in range(4)]
    for turn in range(3):
        answers = [driver.submit(talk, wants_context=True) for talk in talks]
        driver.run()
        for i, answer in enumerate(answers):
            if turn:
                assert answer.timings.n_cached == len(talks[i]) - 30
            answer.assert_same(open_engine(name, n_slots=1).ask(talks[i]))
            talks[i] = [*answer.tokens, *tiny_models.prompt(30, seed=9 + turn)[1:]]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("n_slots", [1, 4])
def test_a_short_unrelated_prompt_leaves_a_long_conversation_as_it_is(
    name: str, n_slots: int, open_engine: Open
) -> None:
    driver = open_engine(name, n_slots=n_slots)
    first = driver.ask(tiny_models.prompt(500), wants_context=True)
    for seed in range(1, 7):
        driver.ask(tiny_models.prompt(12, seed))
    second = [*first.tokens, *tiny_models.prompt(30, seed=1)[1:]]
    warm = driver.ask(second)
    assert warm.timings.n_cached == len(first.tokens) - 1
    warm.assert_same(open_engine(name).ask(second))


@pytest.mark.parametrize("name", TINY)
def test_a_prompt_that_is_being_answered_is_shared_or_evaluated_anew(
    name: str, open_engine: Open
) -> None:
    prompt = tiny_models.prompt(300)
    expected = open_engine(name).ask(prompt, n_predict=60)
    driver = open_engine(name)
    first = driver.submit(prompt, n_predict=60)
    while len(first.text) < 20:
        driver.turn()
    second = driver.submit(prompt, n_predict=60)
    driver.run()
    assert_all_same([first, second], [expected, expected])
    assert second.timings.n_cached == (0 if name == "tiny_mamba" else 299)


@pytest.mark.parametrize("name", TINY)
def test_a_cancelled_prompt_leaves_what_was_evaluated(name: str, open_engine: Open) -> None:
    driver = open_engine(name)
    prompt = tiny_models.prompt(600)
    cancelled = driver.submit(prompt)
    for _ in range(3):
        driver.turn()
    driver.cancel(cancelled)
    warm = driver.ask(prompt)
    assert 0 < warm.timings.n_cached < 600
    warm.assert_same(open_engine(name).ask(prompt))


@pytest.mark.parametrize("name", TINY)
def test_without_room_for_prefixes_answers_are_the_same(name: str, open_engine: Open) -> None:
    driver = open_engine(name, n_slots=2, parking_bytes=0)
    several = [tiny_models.prompt(100 + i, seed=i) for i in range(4)]
    alone = [open_engine(name).ask(prompt) for prompt in several]
    for _ in range(2):
        assert_all_same([driver.ask(prompt) for prompt in several], alone)
