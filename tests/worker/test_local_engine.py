"""An engine on a thread of this process: its answers, its errors, and that nothing is left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_plans
import msgspec
import pytest
import tiny_models

from headrace.engine.corrections import corrections_path, read_corrections
from headrace.engine.errors import ModelFileError, PromptTooLong
from headrace.engine.messages import Done, Generate, Load, SamplingParams, Token
from headrace.server.commands.local_engine import LocalEngine


def load(path: Path) -> Load:
    return Load(
        path=str(path), name="tiny", n_ctx=256, n_slots=1, n_batch=128, n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip


def streamed(path: Path) -> Load:
    """Return how the model at path is loaded to be streamed through a ring."""
    return msgspec.structs.replace(load(path), mode="dense-ffn-streaming", memory_bytes=52 << 20)


def request(engine: LocalEngine, n_predict: int) -> Generate:
    sampling = SamplingParams(temperature=0)
    return Generate(uid=engine.next_uid(), prompt=(), n_predict=n_predict, sampling=sampling)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known of the machine but what the test keeps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def engine(tiny_llama_path: Path) -> Iterator[LocalEngine]:
    before = threading.active_count()
    with LocalEngine(load(tiny_llama_path)) as engine:
        yield engine
    assert threading.active_count() == before


def answer(engine: LocalEngine, n_predict: int = 20) -> tuple[str, Done]:
    asked = msgspec.structs.replace(request(engine, n_predict), ignores_end=True)
    *tokens, done = engine.generate(asked, tiny_models.prompt(9))
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


def test_machine_that_was_not_measured_gives_no_forecast_and_the_command_for_one(
    tiny_llama_path: Path, caplog: pytest.LogCaptureFixture, own_cache: None
) -> None:
    caplog.set_level(logging.INFO)
    with LocalEngine(streamed(tiny_llama_path), learns=True) as engine:
        answer(engine, 64)
        message = engine.loaded.message
        assert (message.forecast, message.tiers.mode) == (None, "dense-ffn-streaming")
        header = engine.loaded.header
    [told] = [text for text in caplog.messages if "no forecast" in text]
    assert f"`headrace profile {tiny_llama_path}`" in told
    assert not corrections_path(header).exists()


def test_forecast_is_corrected_by_what_was_measured(
    tiny_llama_path: Path, caplog: pytest.LogCaptureFixture, own_cache: None
) -> None:
    caplog.set_level(logging.INFO)
    key = golden_plans.pretend(tiny_llama_path, 3e9, n_threads=1).key
    with LocalEngine(streamed(tiny_llama_path), learns=True) as engine:
        before = engine.loaded.forecast
        assert before is not None and before.correction == 1
        assert 2e9 < engine.loaded.load.disk_bytes_per_s <= 3e9
        answer(engine, 63)
        assert engine.loaded.engine.pace.median is None
        answer(engine, 64)
        assert engine.loaded.engine.pace.median is not None
        assert not corrections_path(engine.loaded.header).exists()  # not while it may answer
        header = engine.loaded.header
    assert len([text for text in caplog.messages if "the forecast was" in text]) == 1
    learnt = read_corrections(header, key)["dense-ffn-streaming"]
    with LocalEngine(streamed(tiny_llama_path)) as engine:
        again = engine.loaded.message.forecast
    assert again is not None and again.correction == learnt.decode != 1
    assert again.decode_tokens_per_s == pytest.approx(learnt.decode * before.decode_tokens_per_s)
