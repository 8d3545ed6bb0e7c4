"""One engine, many requests: what they answer, how they end, and that they don't touch each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as c
import pytest
import tiny_models
from bare_loop import BareLoop
from driver import Answer, Driver, song

from headrace.engine.messages import Accepted, Event, Token
from headrace.engine.sequence import MAX_SAME_PIECES

MODELS = ["smollm2_path", "gemma3_path", "tiny_llama_path", "tiny_gemma_path", "tiny_mamba_path"]
TINY = MODELS[2:]
Open = Callable[..., Driver]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def prompts_for(name: str, engine: Driver) -> list[list[int]]:
    """Return eight prompts for a model: short ones, long ones, and some with the same beginning."""
    if name.startswith("tiny"):
        lengths = [5, 40, 63, 64, 65, 150, 300, 400]
        return [tiny_models.prompt(n, seed=n // 100) for n in lengths]
    vocab = engine.engine.vocab
    bos = [vocab.bos] if vocab.adds_bos else []
    return [bos + vocab.tokenize(song(i), parses_control=True) for i in range(8)]


@pytest.mark.parametrize("name", MODELS)
def test_a_greedy_answer_is_token_for_token_that_of_a_bare_loop(
    name: str, request: pytest.FixtureRequest, open_engine: Open
) -> None:
    driver = open_engine(request.getfixturevalue(name))
    bare = BareLoop(driver.engine.model.pointer, 1, n_ctx=1024, n_threads=1)
    prompts = [*prompts_for(name, driver)[-3:], prompts_for(name, driver)[0] * 9]
    assert len(prompts[-1]) < 1024 - 24
    for prompt in prompts:
        answer = driver.ask(prompt, n_predict=24, wants_context=True)
        ((*expected,),), _ = bare.run([prompt], 24)
        bare.clear()
        assert answer.tokens == prompt + expected[: answer.timings.n_generated]
    bare.close()
