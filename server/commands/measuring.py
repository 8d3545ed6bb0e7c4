"""What bench measures: a model's prompt and generation speed, cold and warm, on one Engine.

In: a Job. Out: a Measurement. The tests are those of llama-bench. "pp512" is one prompt of 512
random tokens: inside the timed window is their evaluation, in passes of the engine's batch size,
and the choice of one token. "tg64" is 64 passes of one token each after a prompt of one: inside are
those passes, the choice of each token and its text. Loading, tokenising and the copying of old
prefixes are outside. Unlike llama-bench's, generated tokens are what the model says, sampled with a
fixed seed: which experts a mixture wants follows from what it has read.

Cold: the page cache of the model's files is dropped and the model loaded anew before each run of a
test. Warm: the model stays loaded, and one run of each test went before. Knows no terminal.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from headrace.engine.errors import InvalidRequest
from headrace.engine.messages import Done, Forecast, Generate, Load, Mode, SamplingParams, Timings
from headrace.server.commands.local_engine import LocalEngine

Say = Callable[[str], None]
_Test = Callable[[LocalEngine, int], float]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure; repacks is llama.cpp's default for a resident model."""

    load: Load
    files: tuple[str, ...]
    """Of the model; their page cache is dropped."""
    n_prompt: int
    n_generate: int
    n_runs: int
    repacks: bool = True


class Spread(msgspec.Struct, frozen=True):
    """Figures of several runs, in their order, and what is said of them."""

    median: float
    lowest: float
    highest: float
    runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[float]) -> Spread:
        """Return the spread of runs, not empty."""
        return cls(statistics.median(runs), min(runs), max(runs), tuple(runs))


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one way to run a model."""

    mode: Mode
    budget_bytes: int
    """What weights, streaming, context and buffers may take together."""
    forecast: Forecast | None
    """What was expected of the warm tests; None: the machine, or the disk, was not measured."""
    load_s: Spread
    """Seconds of each cold load; in the first, llama.cpp's own code was loaded too."""
    tokens_per_s: dict[str, Spread]
    """By test and start, such as "pp512 cold" and "tg64 warm"."""


def measure(job: Job, say: Say) -> Measurement:
    """Run all tests; say hears what is being done.

    Raises:
        EngineError: the model can't be loaded, or a test does not fit its context.
    """
    tests: dict[str, _Test] = {
        f"pp{job.n_prompt}": partial(_prompt_speed, job.n_prompt),
        f"tg{job.n_generate}": partial(_generation_speed, job.n_generate),
    }
    loads: list[float] = []
    speeds = {f"{name} {start}": list[float]() for name in tests for start in ("cold", "warm")}
    for run in range(1, job.n_runs + 1):
        for name, test in tests.items():
            say(f"{name} cold, run {run} of {job.n_runs}")
            drop_page_cache(job.files)
            with LocalEngine(job.load, repacks=job.repacks) as engine:
                loads.append(engine.loaded.load_ns / 1e9)
                speeds[f"{name} cold"].append(test(engine, run))
    with LocalEngine(job.load, repacks=job.repacks) as engine:
        for run in range(job.n_runs + 1):  # the first does not count
            for name, test in tests.items():
                say(f"{name} warm, run {run} of {job.n_runs}")
                speed = test(engine, run)
                if run > 0:
                    speeds[f"{name} warm"].append(speed)
        loaded = engine.loaded
    return Measurement(
        mode=loaded.plan.mode,
        budget_bytes=loaded.budget_bytes,
        forecast=loaded.forecast,
        load_s=Spread.of(loads),
        tokens_per_s={name: Spread.of(runs) for name, runs in speeds.items()},
    )


def drop_page_cache(paths: Iterable[str]) -> None:
    """Drop the files at paths from the page cache, but for pages that a process has mapped."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # what was just written can't be dropped before it is on the disk
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _prompt_speed(n_tokens: int, engine: LocalEngine, seed: int) -> float:
    """Return the tokens/s of one prompt of n_tokens."""
    timings = _run(engine, _random_prompt(engine, n_tokens, seed), n_predict=1, seed=seed)
    return (n_tokens - timings.n_cached) / timings.prefill_ns * 1e9


def _generation_speed(n_tokens: int, engine: LocalEngine, seed: int) -> float:
    """Return the tokens/s of n_tokens passes, one token each."""
    # The first token comes from the prompt's own pass.
    timings = _run(engine, _random_prompt(engine, 1, seed), n_predict=n_tokens + 1, seed=seed)
    return n_tokens / timings.decode_ns * 1e9


def _run(engine: LocalEngine, prompt: list[int], *, n_predict: int, seed: int) -> Timings:
    """Return what it took to evaluate prompt and to generate n_predict tokens."""
    request = Generate(
        uid=engine.next_uid(), prompt=(), n_predict=n_predict, ignores_end=True, shifts=False,
        sampling=SamplingParams(seed=seed),
    )  # fmt: skip
    *_, done = engine.generate(request, prompt)
    assert isinstance(done, Done)
    if done.timings.n_generated < n_predict:
        raise InvalidRequest(f"{n_predict} tokens don't fit the model's context of {engine.n_ctx}")
    return done.timings


def _random_prompt(engine: LocalEngine, n_tokens: int, seed: int) -> list[int]:
    """Return n_tokens tokens, a BOS first if the model wants one; another seed, other tokens."""
    vocab = engine.loaded.engine.vocab
    tokens = random.Random(seed).choices(range(vocab.n_tokens), k=n_tokens)
    return [vocab.bos, *tokens[1:]] if vocab.adds_bos else tokens
