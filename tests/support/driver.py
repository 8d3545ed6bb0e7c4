"""Drives an Engine in the test's own thread, turn by turn, and collects what it emits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine import llama
from headrace.engine.engine import Engine
from headrace.engine.messages import (
    Accepted,
    ContextChanged,
    Done,
    Event,
    Failed,
    Generate,
    Load,
    Logprob,
    SamplingParams,
    Timings,
    Token,
)
from headrace.engine.plan import ContextPlan

_SAMPLING = {f.name for f in msgspec.structs.fields(SamplingParams)}
_WORDS = (
    "river stone lamp garden paper window silver horse bread music table winter apple ship forest"
    " mirror candle bridge engine salt copper letter island rabbit ladder"
).split()


# What rounding does to a logit: of the tiny models in float32, and of quantised activations.
TIE = 0.05
TIE_QUANTISED = 2.0


def song(seed: int, n_lines: int = 4) -> str:
    """Return a line of 20 random words, n_lines times, and the first word of another one.

    What follows is certain to a model, and can't be known without the lines.
    """
    words = random.Random(seed).sample(_WORDS, 20)
    return (" ".join(words) + "\n") * n_lines + words[0]


@dataclass(eq=False)
class Answer:
    """What has come of one request so far."""

    uid: int
    chunks: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    n_prompt: int = -1
    done: Done | None = None
    failed: Failed | None = None
    is_cancelled: bool = False

    @property
    def text(self) -> str:
        return "".join(self.chunks) + (self.done.text if self.done else "")

    @property
    def has_ended(self) -> bool:
        return self.done is not None or self.failed is not None or self.is_cancelled

    @property
    def timings(self) -> Timings:
        assert self.done is not None, self.failed
        return self.done.timings

    @property
    def reason(self) -> str:
        assert self.done is not None, self.failed
        return self.done.reason

    @property
    def tokens(self) -> list[int]:
        """The tokens of prompt and answer; of a request that wants its context."""
        assert self.done is not None, self.failed
        return list(self.done.context)

    def part(self, first: int, n_tokens: int) -> Answer:
        """Return n_tokens of an answer with logprobs, as one that ended by its length."""
        assert self.done is not None, self.failed
        logprobs = self.logprobs[first : first + n_tokens]
        text = b"".join(logprob.piece for logprob in logprobs).decode()
        done = msgspec.structs.replace(self.done, text="", reason="length")
        return Answer(self.uid, [text], logprobs, self.n_prompt, done)

    def assert_same(self, reference: Answer, tie: float = TIE) -> None:
        """Fail unless this answer is the reference, up to a choice that was within tie of another.

        Another kernel or order of summation may turn such a choice, and all that follows from it;
        wrong cells or positions turn others.
        """
        for mine, theirs in zip(self.logprobs, reference.logprobs, strict=False):
            if mine.piece != theirs.piece:
                lead = theirs.logprob - dict(theirs.top).get(mine.piece, -math.inf)
                assert lead < tie, (self.text, reference.text, lead)
                return
        assert (self.text, self.reason) == (reference.text, reference.reason)

    def take(self, event: Event) -> None:
        assert not self.has_ended, event
        if isinstance(event, Accepted):
            self.n_prompt = event.n_prompt
        elif isinstance(event, Token):
            assert self.n_prompt >= 0 and event.text
            self.chunks.append(event.text)
            self.logprobs += event.logprobs
        elif isinstance(event, Done):
            self.done = event
            self.logprobs += event.logprobs
        elif isinstance(event, Failed):
            self.failed = event


def assert_all_same(answers: Sequence[Answer], references: Sequence[Answer]) -> None:
    for answer, reference in zip(answers, references, strict=True):
        answer.assert_same(reference)


class Driver:
    """An engine and its requests; greedy and with one thread unless told otherwise."""

    def __init__(
        self, path: Path, *, n_ctx: int = 1024, n_slots: int = 4, n_batch: int = 512,
        n_cells: int = 0, n_threads: int = 1, kv_type: str = "f16", parking_bytes: int = 1 << 30,
    ) -> None:  # fmt: skip
        """Load the model; the slots share n_cells cells, or have n_ctx each."""
        load = Load(
            path=str(path), name=path.stem, n_ctx=n_ctx, n_slots=n_slots, n_batch=n_batch,
            n_threads=n_threads, n_threads_batch=n_threads, kv_type=kv_type,
        )  # fmt: skip

        def plan(n_ctx: int) -> ContextPlan:
            return ContextPlan(n_ctx, n_cells or n_ctx * n_slots, 0, parking_bytes)

        self.engine = Engine(llama.Model(path), load, plan, self._take)
        self.contexts: list[int] = []
        """The context sizes that were changed to."""
        self.on_event: Callable[[Event], None] = lambda event: None
        self._answers: list[Answer] = []

    def submit(self, prompt: str | Sequence[int], **options: Any) -> Answer:
        """Queue a request; options are fields of Generate and SamplingParams."""
        answer = Answer(len(self._answers))
        self._answers.append(answer)
        sampling = {"temperature": 0.0} | {k: v for k, v in options.items() if k in _SAMPLING}
        others = {"n_predict": 32, "n_top_logprobs": 4} | {
            k: v for k, v in options.items() if k not in _SAMPLING
        }
        if isinstance(prompt, str):
            prompt = self.engine.vocab.tokenize(prompt, parses_control=True)
        request = Generate(
            uid=answer.uid, prompt=(), sampling=SamplingParams(**sampling), **others
        )  # fmt: skip
        self.engine.submit(request, list(prompt))
        return answer

    def cancel(self, answer: Answer) -> None:
        self.engine.cancel(answer.uid)
        answer.is_cancelled = True

    def turn(self) -> None:
        self.engine.turn()

    def run(self) -> None:
        """Turn until all requests have ended, and their slots are free."""
        while not all(answer.has_ended for answer in self._answers):
            self.engine.turn()
        self.engine.check()

    def ask(self, prompt: str | Sequence[int], **options: Any) -> Answer:
        """Return the whole answer to one request."""
        answer = self.submit(prompt, **options)
        self.run()
        return answer

    def close(self) -> None:
        self.engine.check()
        self.engine.close()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ContextChanged):
                self.contexts.append(event.n_ctx)
            elif isinstance(event, Accepted | Token | Done | Failed):
                self._answers[event.uid].take(event)
            self.on_event(event)
