"""Decides what the next forward passes evaluate: a pure function from sequences to a plan.

Decode tokens of all running sequences form one pass; a chunk of one prompt forms another, beside
it. They never share a pass: attention kernels choose their path by the number of tokens, and as
far as they allow it a sequence gets the same numbers alone and in company.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from headrace.engine.sequence import Sequence, State

# A prompt's chunk may hold up running answers for about this long.
MAX_STALL_S = 0.25
# llama.cpp's CPU attention changes its kernel below 64 tokens a pass.
MIN_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: the sequences that decode a token, and a chunk of one prompt."""

    decode: tuple[Sequence, ...]
    prefill: Sequence | None
    n_prefill: int


def plan_step(
    running: Seq[Sequence], n_batch: int, prefill_tokens_per_s: float, *, snapshots: bool
) -> Plan:
    """Return what to evaluate next, for running sequences in order of admission.

    The first sequence that is not prefilled gets a chunk: n_batch tokens if nobody decodes, else
    what the measured prefill speed does in MAX_STALL_S. With snapshots (states that can't be cut)
    chunks are a quarter of n_batch, since a sequence can only be rewound to the end of a chunk.
    """
    decode = tuple(s for s in running if s.state is State.DECODE)
    waiting = next((s for s in running if s.state is State.PREFILL), None)
    if waiting is None:
        return Plan(decode, None, 0)
    n_chunk = max(n_batch // 4, 1) if snapshots else n_batch
    if decode:
        n_chunk = min(n_chunk, _power_of_two(prefill_tokens_per_s * MAX_STALL_S))
    # Chunks end at multiples of their size, wherever a reused prefix let the prompt begin.
    n_chunk -= waiting.n_past % n_chunk
    return Plan(decode, waiting, min(n_chunk, waiting.n_unevaluated))


def _power_of_two(n_tokens: float) -> int:
    """Return the greatest power of two in n_tokens, MIN_CHUNK at least."""
    return max(MIN_CHUNK, 1 << (max(int(n_tokens), 1).bit_length() - 1))
