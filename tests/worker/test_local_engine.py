"""An engine on a thread of this process: its answers, its errors, and that nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from headrace.engine.errors import ModelFileError, PromptTooLong
from headrace.engine.messages import Done, Generate, Load, SamplingParams, Token
from headrace.server.commands.local_engine import LocalEngine


def load(path: Path) -> Load:
    return Load(
        path=str(path), name="tiny", n_ctx=256, n_slots=1, n_batch=128, n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip


def request(engine: LocalEngine, n_predict: int) -> Generate:
    sampling = SamplingParams(temperature=0)
    return Generate(uid=engine.next_uid(), prompt=(), n_predict=n_predict, sampling=sampling)


@pytest.fixture
def engine(tiny_llama_path: Path) -> Iterator[LocalEngine]:
    before = threading.active_count()
    with LocalEngine(load(tiny_llama_path)) as engine:
        yield engine
    assert threading.active_count() == before


def answer(engine: LocalEngine, n_predict: int = 20) -> tuple[str, Done]:
    *tokens, done = engine.generate(request(engine, n_predict), tiny_models.prompt(9))
    assert isinstance(done, Done)
    return "".join(event.text for event in tokens) + done.text, done


def test_answer_ends_with_what_it_took(engine: LocalEngine) -> None:
    text, done = answer(engine)
    assert text
    assert (done.timings.n_prompt, done.timings.n_generated) == (9, 20)


def test_answer_that_is_closed_is_cancelled_and_the_next_is_its_own(engine: LocalEngine) -> None:
    whole, _ = answer(engine)
    events = engine.generate(request(engine, -1), tiny_models.prompt(40, seed=5))
    assert isinstance(next(events), Token)
    events.close()
    assert answer(engine)[0] == whole


def test_prompt_that_does_not_fit_fails_and_the_next_does_not(engine: LocalEngine) -> None:
    with pytest.raises(PromptTooLong):
        list(engine.generate(request(engine, 1), tiny_models.prompt(500)))
    assert answer(engine)[0]


def test_bug_in_the_engines_thread_is_raised_where_it_is_waited_for(engine: LocalEngine) -> None:
    wrong: Any = ["no token"]
    with pytest.raises(TypeError):
        list(engine.generate(request(engine, 1), wrong))


def test_model_that_can_not_be_loaded_raises_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ModelFileError, match="no such file"):
        LocalEngine(load(tmp_path / "no.gguf"))
    assert threading.active_count() == before
