"""One engine, many requests: what they answer, how they end, that they leave each other alone."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as llama_cpp
import pytest
import tiny_models
from bare_loop import BareLoop
from driver import TIE_QUANTISED, Answer, Driver, assert_all_same, song

from headrace.engine.messages import Accepted, Event, Token
from headrace.engine.pace import N_TOKENS
from headrace.engine.sequence import MAX_SAME_PIECES

TINY = ["tiny_llama", "tiny_gemma", "tiny_mamba"]
REAL = ["smollm2", "gemma3"]
Open = Callable[..., Driver]

# Kernels for several tokens that add up in another order than those for one are found elsewhere.
to_the_bit = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="known of the kernels of x86-64 alone"
)


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


QUESTIONS = [
    chat(text)
    for text in (
        "Tell me about the sea.", "What is a lighthouse?", "Name three fruits.", "Who was Newton?",
        "Why is the sky blue?", "Write a line about snow.", "How do bees make honey?", "Hello!",
    )
]  # fmt: skip


def prompts(name: str, driver: Driver) -> list[list[int]]:
    """Return eight prompts of different lengths for a model."""
    if name in TINY:
        lengths = (5, 40, 63, 64, 65, 150, 300, 400)
        return [tiny_models.prompt(n, seed) for seed, n in enumerate(lengths)]
    vocab = driver.engine.vocab
    bos = [vocab.bos] if vocab.adds_bos else []
    return [bos + vocab.tokenize(song(i, 3 + i % 3), parses_control=True) for i in range(8)]


# ---- the same numbers as llama.cpp's, alone and in company ----


@pytest.mark.parametrize(
    ("name", "n_prompt"),
    [(name, n) for name in TINY for n in (1, 60, 512, 700)]
    + [("smollm2", 1), ("smollm2", 60), ("smollm2", 200), ("gemma3", 1), ("gemma3", 540)],
)
def test_a_greedy_answer_is_token_for_token_that_of_a_bare_loop(
    name: str, n_prompt: int, open_engine: Open
) -> None:
    driver = open_engine(name, n_slots=2, n_batch=512, kv_type="f16")
    prompt = (prompts(name, driver)[-1] * 6)[:n_prompt]
    bare = BareLoop(driver.engine.model.pointer, 1, n_ctx=1024, n_threads=1)
    (expected,), _ = bare.run([prompt], 20)
    bare.close()
    answer = driver.ask(prompt, n_predict=20, wants_context=True)
    assert answer.tokens == prompt + expected[: answer.timings.n_generated]
    if answer.reason == "stop":
        assert driver.engine.vocab.ends_generation(expected[answer.timings.n_generated])


@pytest.mark.parametrize("repeat", range(3))
@pytest.mark.parametrize("name", TINY)
def test_eight_at_once_answer_as_each_alone(name: str, repeat: int, open_engine: Open) -> None:
    together = open_engine(name, n_slots=8)
    several = prompts(name, together)
    alone = [open_engine(name, n_slots=1).ask(prompt, n_predict=60) for prompt in several]
    assert len({answer.text for answer in alone}) == 8
    # The first round finds an empty cache, the next ones what the round before has left.
    for _ in range(1 + repeat):
        answers = [together.submit(prompt, n_predict=60) for prompt in several]
        together.run()
    assert_all_same(answers, alone)


Numbers = list[float]


@pytest.fixture(scope="module")
def answers_alone() -> dict[str, tuple[str, Numbers]]:
    """What SmolLM2 answers to each question when nobody else asks, filled by the first test."""
    return {}


def numbers(answer: Answer) -> tuple[str, Numbers]:
    return answer.text, [logprob.logprob for logprob in answer.logprobs]


@to_the_bit
@pytest.mark.parametrize("repeat", range(3))
def test_eight_chats_at_once_get_to_the_bit_the_numbers_of_each_alone(
    repeat: int, open_engine: Open, answers_alone: dict[str, tuple[str, Numbers]]
) -> None:
    options = {"n_predict": 16, "n_top_logprobs": 0}
    if not answers_alone:
        for question in QUESTIONS:
            alone = open_engine("smollm2", n_slots=1).ask(question, **options)
            answers_alone[question] = numbers(alone)
    driver = open_engine("smollm2", n_slots=8)
    order = QUESTIONS[repeat:] + QUESTIONS[:repeat]
    answers = {question: driver.submit(question, **options) for question in order}
    driver.run()
    assert {question: numbers(answer) for question, answer in answers.items()} == answers_alone


@to_the_bit
def test_a_chat_beside_a_long_prompt_gets_to_the_bit_the_numbers_it_gets_alone(
    open_engine: Open,
) -> None:
    options = {"n_predict": 16, "n_top_logprobs": 0}
    # Two threads: llama.cpp's kernel for a lone token divides the cells among them.
    alone = numbers(open_engine("smollm2", n_threads=2).ask(QUESTIONS[0], **options))
    driver = open_engine("smollm2", n_threads=2)
    answer = driver.submit(QUESTIONS[0], **options)
    while not answer.text:
        driver.turn()
    driver.submit(song(0, 15), n_predict=1)
    driver.run()
    assert numbers(answer) == alone


@pytest.mark.parametrize("name", REAL)
def test_long_prompts_at_once_answer_as_each_alone(name: str, open_engine: Open) -> None:
    driver = open_engine(name, n_ctx=512)
    several = prompts(name, driver)[:3]
    alone = [open_engine(name, n_ctx=512).ask(p, n_predict=12) for p in several]
    answers = [driver.submit(prompt, n_predict=12) for prompt in several]
    driver.run()
    for answer, reference in zip(answers, alone, strict=True):
        answer.assert_same(reference, TIE_QUANTISED)


def test_a_request_that_comes_while_others_decode_answers_as_alone(open_engine: Open) -> None:
    first, second = tiny_models.prompt(50, 1), tiny_models.prompt(700, 2)
    alone = [open_engine("tiny_llama").ask(p, n_predict=90) for p in (first, second)]
    driver = open_engine("tiny_llama")
    answers = [driver.submit(first, n_predict=90)]
    for _ in range(20):
        driver.turn()
    answers.append(driver.submit(second, n_predict=90))
    driver.run()
    assert_all_same(answers, alone)


# ---- cancelling ----


def cancel_when(driver: Driver, answer: Answer, happens: Callable[[Event], bool]) -> None:
    def look(event: Event) -> None:
        if not answer.is_cancelled and happens(event):
            driver.cancel(answer)

    driver.on_event = look


def is_accepted(uid: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Accepted) and event.uid == uid


def has_text(uid: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Token) and event.uid == uid


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("when", [is_accepted, has_text], ids=["prefilling", "decoding"])
def test_a_cancelled_sequence_frees_its_slot(
    name: str, when: Callable[[int], Callable[[Event], bool]], open_engine: Open
) -> None:
    prompt, long = tiny_models.prompt(30), tiny_models.prompt(900, 1)
    expected = open_engine(name).ask(prompt)
    driver = open_engine(name, n_slots=1)
    cancelled, other = driver.submit(long), driver.submit(prompt)
    cancel_when(driver, cancelled, when(cancelled.uid))
    driver.run()
    other.assert_same(expected)
    assert cancelled.is_cancelled and len(cancelled.text) <= 1


def test_a_cancelled_sequence_that_waits_never_runs(open_engine: Open) -> None:
    driver = open_engine("tiny_llama", n_slots=1)
    first, second, third = (driver.submit(tiny_models.prompt(9, i)) for i in range(3))
    cancel_when(driver, second, is_accepted(third.uid))
    driver.run()
    assert (first.reason, third.reason, second.chunks) == ("length", "length", [])


def test_a_cancelled_request_leaves_the_others_as_they_are(open_engine: Open) -> None:
    several = [tiny_models.prompt(60, seed) for seed in range(3)]
    alone = [open_engine("tiny_llama").ask(prompt) for prompt in several]
    driver = open_engine("tiny_llama")
    answers = [driver.submit(prompt) for prompt in several]
    cancel_when(driver, answers[0], has_text(answers[1].uid))
    driver.run()
    assert_all_same(answers[1:], alone[1:])


def test_cancelling_twice_or_after_the_end_or_what_never_was_does_nothing(
    open_engine: Open,
) -> None:
    driver = open_engine("tiny_llama")
    ended = driver.ask(tiny_models.prompt(9))
    for uid in (ended.uid, ended.uid, 99):
        driver.engine.cancel(uid)
    driver.ask(tiny_models.prompt(9)).assert_same(ended)


# ---- when an answer ends ----


def test_no_tokens_asked_for_is_no_text_but_an_evaluated_prompt(open_engine: Open) -> None:
    driver = open_engine("tiny_llama")
    answer = driver.ask(tiny_models.prompt(50), n_predict=0)
    assert (answer.text, answer.reason, answer.timings.n_generated) == ("", "length", 0)
    assert driver.ask(tiny_models.prompt(50)).timings.n_cached == 49


def test_as_many_tokens_as_asked_for_end_with_length(open_engine: Open) -> None:
    answer = open_engine("tiny_llama").ask(tiny_models.prompt(50), n_predict=7)
    assert (len(answer.text), answer.reason, answer.timings.n_generated) == (7, "length", 7)


def test_without_a_limit_an_answer_goes_on_for_ten_contexts(open_engine: Open) -> None:
    answer = open_engine("tiny_mamba", n_ctx=64).ask(tiny_models.prompt(5), n_predict=-1)
    assert (answer.timings.n_generated, answer.reason) == (640, "length")


def test_an_answer_may_go_on_until_the_context_is_full(open_engine: Open) -> None:
    answer = open_engine("tiny_llama", n_ctx=256).ask(tiny_models.prompt(200), n_predict=-2)
    assert (answer.timings.n_generated, answer.reason) == (56, "length")


def test_the_end_of_the_models_turn_ends_the_answer(open_engine: Open) -> None:
    answer = open_engine("smollm2").ask(chat("Say yes."), n_predict=200)
    assert answer.reason == "stop"
    assert "<|im_end|>" not in answer.text


RUNAWAY = {"frequency_penalty": -5.0, "repeat_last_n": -1}


def test_a_model_that_repeats_itself_is_stopped(open_engine: Open) -> None:
    answer = open_engine("tiny_llama").ask(tiny_models.prompt(9), n_predict=500, **RUNAWAY)
    assert (answer.reason, len(answer.text) < 200) == ("length", True)
    *_, before, last = re.findall(r"((.)\2*)", answer.text)
    assert (before[1] != last[1], len(last[0])) == (True, MAX_SAME_PIECES + 1)


def test_a_measurement_has_its_length_whatever_is_generated(open_engine: Open) -> None:
    fixed = {"n_predict": 200, "ignores_end": True}
    ended = open_engine("smollm2").ask(chat("Say yes."), **fixed)
    repeated = open_engine("tiny_llama").ask(tiny_models.prompt(9), **fixed, **RUNAWAY)
    assert ended.timings.n_generated == repeated.timings.n_generated == 200


# ---- text ----


@pytest.mark.parametrize("n_before", [1, 2, 5])
def test_a_stop_string_over_token_borders_is_never_sent(n_before: int, open_engine: Open) -> None:
    prompt = tiny_models.prompt(40)
    whole = open_engine("tiny_llama").ask(prompt, n_predict=60).text
    stop = whole[20 - n_before : 24]
    answer = open_engine("tiny_llama").ask(prompt, n_predict=60, stop=("never", stop))
    assert answer.text == whole[: whole.index(stop)]
    assert answer.reason == "stop"
    assert answer.timings.n_generated == whole.index(stop) + len(stop)


def test_text_held_back_for_a_stop_string_comes_with_the_end(open_engine: Open) -> None:
    prompt = tiny_models.prompt(40)
    whole = open_engine("tiny_llama").ask(prompt, n_predict=20).text
    answer = open_engine("tiny_llama").ask(prompt, n_predict=20, stop=(whole[-3:] + "?",))
    assert (answer.text, answer.reason) == (whole, "length")


def test_emoji_come_whole_though_tokens_split_them(open_engine: Open) -> None:
    driver = open_engine("smollm2")
    emoji = "🙂🚀🎉🌍🔥"
    assert len(driver.engine.vocab.tokenize(emoji, parses_control=False)) > len(emoji)
    answer = driver.ask((emoji + "\n") * 12, n_predict=60)
    assert Counter(answer.text)["🚀"] > 2
    assert "\ufffd" not in answer.text
    assert all(set(chunk) <= set(emoji + "\n") for chunk in answer.chunks)


# ---- sampling ----


HOT = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "n_predict": 16}


def test_a_seed_reproduces_an_answer_and_another_one_changes_it(open_engine: Open) -> None:
    prompt = tiny_models.prompt(30)
    first, again, other = (
        open_engine("tiny_llama").ask(prompt, seed=seed, **HOT).text for seed in (5, 5, 6)
    )
    assert first == again != other


@to_the_bit
def test_a_seed_gives_the_same_answer_in_company(open_engine: Open) -> None:
    driver = open_engine("smollm2")
    alone = [driver.ask(question, seed=7, **HOT).text for question in QUESTIONS[:4]]
    answers = [driver.submit(question, seed=7, **HOT) for question in QUESTIONS[:4]]
    driver.run()
    assert [answer.text for answer in answers] == alone


def test_without_a_seed_answers_differ(open_engine: Open) -> None:
    driver = open_engine("tiny_llama")
    assert len({driver.ask(tiny_models.prompt(30), **HOT).text for _ in range(4)}) > 1


@pytest.mark.parametrize(
    "penalty", [{"repeat_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.0}]
)
def test_a_penalty_makes_an_answer_repeat_less(penalty: dict[str, Any], open_engine: Open) -> None:
    driver = open_engine("smollm2")
    prompt = "One two three, one two three, one"
    plain = Counter(driver.ask(prompt, n_predict=40).text.split())
    varied = Counter(driver.ask(prompt, n_predict=40, **penalty).text.split())
    assert max(varied.values()) < max(plain.values()) / 2


def test_a_penalty_that_looks_at_no_tokens_changes_nothing(open_engine: Open) -> None:
    prompt = tiny_models.prompt(30)
    plain, off, on = (
        open_engine("tiny_llama").ask(prompt, **penalty).text
        for penalty in ({}, {"repeat_penalty": 2.0, "repeat_last_n": 0}, {"repeat_penalty": 2.0})
    )
    assert plain == off != on


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_one_candidate_left_is_the_greedy_answer(limit: dict[str, Any], open_engine: Open) -> None:
    prompt = tiny_models.prompt(30)
    greedy = open_engine("tiny_llama").ask(prompt, n_predict=16)
    assert open_engine("tiny_llama").ask(prompt, **HOT | limit).text == greedy.text


def test_logprobs_spell_the_text_and_are_those_of_the_greedy_choice(open_engine: Open) -> None:
    answer = open_engine("smollm2").ask("🙂🚀\n" * 12, n_predict=30, n_top_logprobs=3)
    assert b"".join(logprob.piece for logprob in answer.logprobs) == answer.text.encode()
    assert len(answer.logprobs) == answer.timings.n_generated
    for logprob in answer.logprobs:
        assert logprob.top[0] == (logprob.piece, logprob.logprob)
        assert len(logprob.top) == 3


# ---- what an engine owns ----


def test_every_sampler_that_is_made_is_freed(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: Counter[str] = Counter()

    def count(name: str) -> None:
        real = getattr(llama_cpp, name)

        def counted(*arguments: Any) -> Any:
            live[name] += 1
            return real(*arguments)

        monkeypatch.setattr(llama_cpp, name, counted)

    count("llama_sampler_chain_init")
    count("llama_sampler_free")
    driver = open_engine("tiny_llama", n_ctx=512, n_cells=512, n_slots=3)
    answers = [driver.submit(tiny_models.prompt(200, i), n_predict=200) for i in range(3)]
    while len(answers[1].text) < 100:  # by then the youngest has been preempted, and waits
        driver.turn()
    driver.cancel(answers[2])
    driver.cancel(answers[0])
    driver.run()
    assert live["llama_sampler_chain_init"] == live["llama_sampler_free"] == 3


def test_pace_is_that_of_answers_which_run_alone(open_engine: Open) -> None:
    driver = open_engine("tiny_llama")
    options = {"n_predict": N_TOKENS, "ignores_end": True}
    driver.submit(tiny_models.prompt(5), **options)
    driver.submit(tiny_models.prompt(9), **options)
    driver.run()
    assert driver.engine.pace.median is None
    driver.ask(tiny_models.prompt(7), **options)
    assert driver.engine.pace.median is not None
