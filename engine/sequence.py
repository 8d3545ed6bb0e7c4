"""One request's timeline of tokens while it is being evaluated; plain values, no llama.cpp."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Protocol

from headrace.engine.detokenizer import Detokenizer
from headrace.engine.messages import Generate, Logprob, Timings

# Ollama's guard: a model that repeats one piece this often is running away.
MAX_SAME_PIECES = 30


class State(enum.Enum):
    """Where a sequence is in its life; NEXT says which way it may go."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


NEXT: dict[tuple[State, str], State] = {
    (State.WAITING, "admit"): State.PREFILL,
    (State.PREFILL, "prefilled"): State.DECODE,
    # A full context was cut: what is left is evaluated anew.
    (State.DECODE, "shift"): State.PREFILL,
    # No free cells: the sequence gives up its own and queues again.
    (State.PREFILL, "preempt"): State.WAITING,
    (State.DECODE, "preempt"): State.WAITING,
    (State.WAITING, "finish"): State.FINISHED,
    (State.PREFILL, "finish"): State.FINISHED,
    (State.DECODE, "finish"): State.FINISHED,
}


class TokenSampler(Protocol):
    """What a sequence owns to pick its tokens."""

    def close(self) -> None: ...


class Sequence:
    """The tokens of one request, how many of them are evaluated, and what they cost."""

    def __init__(
        self, request: Generate, tokens: list[int], n_ctx: int,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:  # fmt: skip
        self.request = request
        self.uid = request.uid
        self.tokens = tokens
        """Prompt and answer; the last one is not evaluated while in DECODE."""
        self.n_ctx = n_ctx
        self.n_prompt = len(tokens)
        self.n_cached = 0
        self.n_past = 0
        """Tokens evaluated: positions 0 to n_past - 1 are in the KV cache."""
        self.n_generated = 0
        self.state = State.WAITING
        self.seq_id = -1
        self.sampler: TokenSampler | None = None
        self.detokenizer = Detokenizer(request.stop)
        self.held_logprobs: list[Logprob] = []
        self._clock = clock
        self._arrived_ns = clock()
        self._admitted_ns = self._first_token_ns = 0
        self._last_piece = b""
        self._n_same = 0

    @property
    def n_unevaluated(self) -> int:
        return len(self.tokens) - self.n_past

    @property
    def n_predict(self) -> int:
        """Return how many tokens the request may generate.

        Negative limits are bounded as Ollama does, at ten contexts; -2 fills the context.
        """
        asked = self.request.n_predict
        most = 10 * self.n_ctx
        if asked == -2:
            return max(self.n_ctx - self.n_prompt, 1)
        return most if asked < 0 else min(asked, most)

    def move(self, event: str) -> None:
        """Change state by event; a move that NEXT does not know is a bug."""
        self.state = NEXT[self.state, event]
        if event == "admit" and not self._admitted_ns:
            self._admitted_ns = self._clock()

    def append(self, token: int) -> None:
        """Add a generated token, not evaluated yet."""
        if not self._first_token_ns:
            self._first_token_ns = self._clock()
        self.tokens.append(token)
        self.n_generated += 1

    def repeats(self, piece: bytes) -> bool:
        """Tell whether piece is one too many of the same, blanks around it aside."""
        piece = piece.strip()
        self._n_same = self._n_same + 1 if piece == self._last_piece else 1
        self._last_piece = piece
        return self._n_same > MAX_SAME_PIECES

    def cut(self, n_keep: int) -> None:
        """Drop the older half of what follows the first n_keep tokens; n_past starts anew."""
        n_keep = min(n_keep, self.n_ctx - 2)
        n_drop = max((len(self.tokens) - n_keep) // 2, 1)
        del self.tokens[n_keep : n_keep + n_drop]
        self.n_past = 0

    def timings(self) -> Timings:
        now = self._clock()
        admitted = self._admitted_ns or now
        first = self._first_token_ns or now
        return Timings(
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_generated=self.n_generated,
            queue_ns=admitted - self._arrived_ns,
            prefill_ns=max(first - admitted, 1),
            decode_ns=max(now - first, 1),
        )
