"""How fast one sequence alone is evaluated and decodes, for comparison with the forecast.

In: chunks of a sequence's prompt, the start of its answer, its decode steps, and whatever comes
between them. Out: the last prompts, the median of the last answers' speeds, what was read for it,
and one line in the log. Knows no model.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# The first is of the prompt's last pass, the others are a decode step each.
N_TOKENS = 64
# Answers that the median is of; and as many prompts, each so long that starting does not count.
_N_ANSWERS = 15
_LEAST_PROMPT = 256


@dataclass(frozen=True, slots=True, order=True)
class Answer:
    """What was measured of one answer."""

    tokens_per_s: float
    read_bytes_per_token: float
    n_context: int
    """Tokens before it and of it, on average."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, or what came of it after an interruption, and the time of its passes."""

    n_tokens: int
    seconds: float


class Pace:
    """Measures prompts, and the first N_TOKENS tokens of answers, that nothing else interrupts."""

    def __init__(
        self, expected_tokens_per_s: float | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        bytes_read: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """Compare with expected_tokens_per_s in the log; None: there is no forecast.

        bytes_read counts what is read of the weights.
        """
        self._expected = expected_tokens_per_s
        self._clock = clock
        self._bytes_read = bytes_read
        self._answers: deque[Answer] = deque(maxlen=_N_ANSWERS)
        self.median: Answer | None = None
        """That of the last answers' speeds; None: none of them was that long and alone."""
        self._prompts: deque[Prompt] = deque(maxlen=_N_ANSWERS)
        self._prompt_uid: int | None = None
        self._prompt = Prompt(0, 0.0)
        self._uid: int | None = None
        self._n_prompt = self._n_steps = 0
        self._started_ns = self._bytes_before = 0

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The last that were long enough."""
        return tuple(self._prompts)

    def prefill(self, n_tokens: int, seconds: float) -> None:
        """Count a chunk of the prompt that interrupt has named."""
        prompt = self._prompt
        self._prompt = Prompt(prompt.n_tokens + n_tokens, prompt.seconds + seconds)

    def start(self, uid: int, n_prompt: int) -> None:
        """Begin with the first token of an answer, which its prompt's last pass gave."""
        if uid == self._prompt_uid and self._prompt.n_tokens >= _LEAST_PROMPT:
            self._prompts.append(self._prompt)
        self._prompt_uid = None
        self._uid, self._n_prompt, self._n_steps = uid, n_prompt, 0
        self._started_ns, self._bytes_before = self._clock(), self._bytes_read()

    def interrupt(self, prompt_uid: int | None = None) -> None:
        """Forget the answer at hand: other work is done between its steps.

        The prompt at hand, too, unless that work is its next chunk.
        """
        self._uid = None
        if prompt_uid is None or prompt_uid != self._prompt_uid:
            self._prompt_uid, self._prompt = prompt_uid, Prompt(0, 0.0)

    def step(self, uid: int) -> None:
        """Count a decode step of a sequence that runs alone."""
        if uid != self._uid:
            return
        self._n_steps += 1
        if self._n_steps < N_TOKENS - 1:
            return
        speed = self._n_steps * 1e9 / max(self._clock() - self._started_ns, 1)
        if self._expected is not None and not self._answers:
            logger.info(
                "uid %d: %d tokens at %.3g tokens/s, the forecast was %.3g",
                uid, N_TOKENS, speed, self._expected,
            )  # fmt: skip
        n_bytes = self._bytes_read() - self._bytes_before
        n_context = self._n_prompt + N_TOKENS // 2
        self._answers.append(Answer(speed, n_bytes / self._n_steps, n_context))
        self.median = statistics.median_low(self._answers)
        self._uid = None
