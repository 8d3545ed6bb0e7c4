"""Which sequence's tokens lie in the KV cache, and what of them a new prompt can reuse.

The owner of llama.cpp's sequence ids. An id is held by a running sequence, or free; a free one
keeps its tokens as a prefix for later prompts until the room is needed, least recently used first.
Knows token ids and the few memory operations of a context, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

# Snapshots kept for a sequence whose state can't be cut.
MAX_SNAPSHOTS = 8


class Memory(Protocol):
    """The memory operations of a context; llama.Context is the real one."""

    def remove(self, seq_id: int, first: int = 0) -> bool: ...
    def copy(self, source: int, target: int, n_tokens: int) -> None: ...
    def holds_window(self, seq_id: int, n_tokens: int) -> bool: ...
    def save(self, seq_id: int) -> bytes: ...
    def restore(self, seq_id: int, state: bytes) -> bool: ...


@dataclass(slots=True)
class _Entry:
    """What is known of one sequence id."""

    tokens: list[int] = field(default_factory=list)
    is_held: bool = False
    used_at: int = 0
    snapshots: dict[int, bytes] = field(default_factory=dict)
    """Number of tokens → state after them; only for states that can't be cut."""


class KVCache:
    """Sequence ids and the prefixes in their cells."""

    def __init__(self, memory: Memory, n_seqs: int, *, can_cut: bool) -> None:
        """Own the ids 0 to n_seqs - 1 of memory, which is empty.

        can_cut is false for recurrent models: their state after n tokens exists only where it was
        saved, so prompts resume from snapshots.
        """
        self._memory = memory
        self._entries = [_Entry() for _ in range(n_seqs)]
        self._can_cut = can_cut
        self._clock = 0

    def acquire(self, prompt: Seq[int]) -> tuple[int, int]:
        """Hold a sequence id for prompt and return it with the number of tokens already there.

        At least the last token of prompt is left to evaluate. There must be a free id.
        """
        source, n_cached = self._best_source(prompt)
        target = self._target(source, n_cached)
        if n_cached and not self._bring(source, target, n_cached):
            n_cached = 0
        if not n_cached:
            self._empty(target)
        entry = self._entries[target]
        entry.tokens = list(prompt[:n_cached])
        entry.snapshots = {n: s for n, s in entry.snapshots.items() if n <= n_cached}
        entry.is_held = True
        self._touch(entry)
        return target, n_cached

    def extend(self, seq_id: int, tokens: Seq[int], *, saves: bool = False) -> None:
        """Record that tokens were evaluated; with saves, keep a snapshot of the state after them."""
        entry = self._entries[seq_id]
        entry.tokens.extend(tokens)
        if saves and not self._can_cut:
            entry.snapshots[len(entry.tokens)] = self._memory.save(seq_id)
            if len(entry.snapshots) > MAX_SNAPSHOTS:
                del entry.snapshots[_least_useful(sorted(entry.snapshots))]

    def rewind(self, seq_id: int, tokens: Seq[int]) -> int:
        """Cut a held sequence to what it shares with tokens; return the number of tokens left."""
        entry = self._entries[seq_id]
        n = self._usable(seq_id, min(_common(entry.tokens, tokens), len(tokens) - 1))
        if n and not self._bring(seq_id, seq_id, n):
            n = 0
        if not n:
            self._empty(seq_id)
        del entry.tokens[n:]
        return n

    def release(self, seq_id: int) -> None:
        """Free a held id; its tokens stay as a prefix."""
        entry = self._entries[seq_id]
        assert entry.is_held
        entry.is_held = False
        self._touch(entry)

    def drop(self, seq_id: int) -> None:
        """Free a held id and forget its tokens."""
        self._empty(seq_id)
        self._entries[seq_id].is_held = False

    def evict(self) -> bool:
        """Forget the least recently used prefix; False if there is none."""
        free = [i for i, e in enumerate(self._entries) if not e.is_held and e.tokens]
        if not free:
            return False
        self._empty(min(free, key=lambda i: self._entries[i].used_at))
        return True

    @property
    def n_held(self) -> int:
        return sum(e.is_held for e in self._entries)

    @property
    def prefix_lengths(self) -> list[int]:
        """Return the tokens of each prefix that is kept but not in use."""
        return [len(e.tokens) for e in self._entries if e.tokens and not e.is_held]

    def _best_source(self, prompt: Seq[int]) -> tuple[int, int]:
        """Return the id that shares the longest usable prefix with prompt, and its length."""
        best, n_best = -1, 0
        for i, entry in enumerate(self._entries):
            if entry.is_held and not self._can_cut:
                continue  # its state has moved on and belongs to a running sequence
            n = self._usable(i, min(_common(entry.tokens, prompt), len(prompt) - 1))
            if n > n_best or (n == n_best and n and self._entries[best].is_held):
                best, n_best = i, n
        return best, n_best

    def _usable(self, seq_id: int, n: int) -> int:
        """Return how many of the first n tokens of an id can be resumed from."""
        entry = self._entries[seq_id]
        if self._can_cut:
            return n if n > 0 and self._memory.holds_window(seq_id, n) else 0
        if n == len(entry.tokens):
            return n
        return max((at for at in entry.snapshots if at <= n), default=0)

    def _target(self, source: int, n_cached: int) -> int:
        """Return the id that the prompt will use: the source, or one to copy its prefix to.

        The source itself is taken if it is free and most of it is reused. A long conversation that
        shares only its beginning with the prompt is kept, and its cells are shared.
        """
        free = [i for i, e in enumerate(self._entries) if not e.is_held]
        assert free, "no free sequence id"
        others = [i for i in free if i != source] or free
        spare = min(others, key=lambda i: (bool(self._entries[i].tokens), self._entries[i].used_at))
        if source not in free:
            return spare
        entry = self._entries[source]
        if not self._can_cut or 2 * n_cached >= len(entry.tokens) or spare == source:
            return source
        return spare

    def _bring(self, source: int, target: int, n: int) -> bool:
        """Make target hold exactly the first n tokens of source."""
        entry = self._entries[source]
        if target != source:
            self._empty(target)
            self._memory.copy(source, target, n)
            return True
        if n == len(entry.tokens):
            return True
        if not self._can_cut and not self._memory.restore(source, entry.snapshots[n]):
            return False
        return self._memory.remove(source, n)

    def _empty(self, seq_id: int) -> None:
        self._memory.remove(seq_id)
        entry = self._entries[seq_id]
        entry.tokens = []
        entry.snapshots = {}

    def _touch(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used_at = self._clock


def _common(a: Seq[int], b: Seq[int]) -> int:
    """Return the length of the common prefix; compares blocks, a 12,000-token prompt is usual."""
    n, n_block = min(len(a), len(b)), 512
    for start in range(0, n, n_block):
        if a[start : start + n_block] != b[start : start + n_block]:
            stop = min(start + n_block, n)
            return next((i for i in range(start, stop) if a[i] != b[i]), stop)
    return n


def _least_useful(positions: Seq[int]) -> int:
    """Return the position whose loss leaves the smallest gap; the last one is always kept."""
    gaps = zip((0, *positions), positions, positions[1:], strict=False)
    return min(gaps, key=lambda gap: gap[2] - gap[0])[1]
