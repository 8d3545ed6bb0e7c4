"""Which sequence's tokens lie in the KV cache, and what a new prompt can reuse of what was there.

The owner of llama.cpp's sequence ids. Cells hold the running sequences and those that finished
since somebody last ran alone; when a request begins alone, idle prefixes are parked: copied out of
the cells into plain memory, from where they come back when a prompt begins like them. So idle
conversations don't slow down the attention of running ones. While sequences run nothing is removed
from the cells if it can be avoided: new tokens would fill the holes, attention would meet the
tokens of a sequence in another order, and its numbers would change in the last bits. Knows token
ids and the few memory operations of a context, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

# Prefixes that may stay in cells beside running sequences.
_N_SPARE_IDS = 8
# Snapshots kept for a sequence whose state can't be cut.
MAX_SNAPSHOTS = 8
# llama.cpp's attention takes another kernel for a lone token when it sees 512 cells or more, and it
# sees them in steps of 256: a sequence up to this long, alone and at the front, stays below.
MAX_SETTLED_TOKENS = 256


def n_sequence_ids(n_slots: int, *, can_cut: bool) -> int:
    """Return how many sequences a context for n_slots has: theirs, spare ones and a companion.

    Spare ids let prompts share the cells of idle prefixes, and keep those that can't be parked. A
    state that can't be cut is as large for an idle id as for a running one: of those one is spare.
    """
    return n_slots + (_N_SPARE_IDS if can_cut else 1) + 1


class Memory(Protocol):
    """The memory operations of a context; llama.Context is the real one."""

    def remove(self, seq_id: int, first: int = 0) -> bool: ...
    def copy(self, source: int, target: int, n_tokens: int) -> None: ...
    def holds_window(self, seq_id: int, n_tokens: int) -> bool: ...
    def saves_window(self, n_saved: int, n_tokens: int) -> bool: ...
    def state_bytes(self, seq_id: int) -> int: ...
    def save(self, seq_id: int, *, whole: bool) -> bytearray: ...
    def restore(self, seq_id: int, state: bytearray, *, whole: bool) -> bool: ...


@dataclass(slots=True)
class _Prefix:
    """Tokens that were evaluated, in cells under a sequence id or parked."""

    tokens: list[int] = field(default_factory=list)
    snapshots: dict[int, bytearray] = field(default_factory=dict)
    """Number of tokens → state after them; only for states that can't be cut."""
    state: bytearray | None = None
    """All of its cells, if it is parked."""
    is_held: bool = False
    """Whether a running sequence owns it."""
    is_settled: bool = False
    """Whether its cells are the first ones: nothing else was in cells since it came."""
    used_at: int = 0

    @property
    def n_bytes(self) -> int:
        return len(self.state or b"") + sum(map(len, self.snapshots.values()))


class KVCache:
    """Sequence ids, the tokens in their cells, and the prefixes that are parked."""

    def __init__(
        self, memory: Memory, n_seqs: int, *, can_cut: bool, parking_bytes: int = 1 << 30
    ) -> None:
        """Own the ids 0 to n_seqs - 1 of memory, which is empty, and parking_bytes beside it.

        can_cut is false for recurrent models: their state after n tokens exists only where it was
        saved, so prompts resume from snapshots.
        """
        self._memory = memory
        self._in_cells = [_Prefix() for _ in range(n_seqs)]
        self._parked: list[_Prefix] = []
        self._can_cut = can_cut
        self._parking_bytes = self._planned_bytes = parking_bytes
        self._clock = 0

    def acquire(self, prompt: Seq[int]) -> tuple[int, int]:
        """Hold a sequence id for prompt and return it with the number of tokens already there.

        At least the last token of prompt is left to evaluate. There must be an id that is not held.
        """
        source, n_cached = self._best_source(prompt)
        takes_over = source is not None and self._takes_over(source, n_cached)
        stays = None
        if source is not None and takes_over and source.state is None:
            stays = source if source.is_settled or self._loses(source) else None
        if not self.n_held:
            self._park_idle(but=stays)
        target = self._seq_id(stays) if stays is not None else self._spare_id(source)
        if source is None or not self._bring(source, target, n_cached, takes_over=takes_over):
            n_cached = 0
            self._empty(target)
        prefix = self._in_cells[target]
        prefix.is_held = True
        self._touch(prefix)
        return target, n_cached

    def extend(self, seq_id: int, tokens: Seq[int], *, saves: bool = False) -> None:
        """Record that tokens were evaluated; with saves, snapshot the state after them."""
        prefix = self._in_cells[seq_id]
        prefix.tokens.extend(tokens)
        if saves and not self._can_cut:
            prefix.snapshots[len(prefix.tokens)] = self._memory.save(seq_id, whole=False)
            if len(prefix.snapshots) > MAX_SNAPSHOTS:
                del prefix.snapshots[_least_useful(sorted(prefix.snapshots))]

    def rewind(self, seq_id: int, tokens: Seq[int]) -> int:
        """Cut a held sequence to what it shares with tokens; return the number of tokens left."""
        prefix = self._in_cells[seq_id]
        n = self._usable(prefix, min(_common(prefix.tokens, tokens), len(tokens) - 1))
        if not n or not self._cut(seq_id, n):
            n = 0
            self._empty(seq_id)
        return n

    def settle(self, seq_id: int) -> None:
        """Move a held sequence that runs alone to the first cells, if that keeps its kernels.

        Then a short answer is computed as if nobody had been there.
        """
        prefix = self._in_cells[seq_id]
        if prefix.is_settled or len(prefix.tokens) > MAX_SETTLED_TOKENS:
            return
        self._park_idle()
        if any(other.tokens for other in self._in_cells if other is not prefix):
            return  # it may share cells with what had to stay, and they would not become free
        state = self._memory.save(seq_id, whole=True)
        self._memory.remove(seq_id)
        prefix.is_settled = True
        if not self._memory.restore(seq_id, state, whole=True):
            raise RuntimeError(f"the state of sequence {seq_id} does not fit where it came from")

    def wants_company(self, seq_id: int) -> bool:
        """Tell whether a lone token of a short sequence would get another kernel because of others.

        Then the pass must have a second token, as it has when the neighbours decode too.
        """
        prefix = self._in_cells[seq_id]
        if prefix.is_settled or len(prefix.tokens) > MAX_SETTLED_TOKENS:
            return False
        return sum(len(p.tokens) for p in self._in_cells) >= MAX_SETTLED_TOKENS

    def release(self, seq_id: int) -> None:
        """Give up a held id; its tokens stay as a prefix for later prompts."""
        prefix = self._in_cells[seq_id]
        assert prefix.is_held
        prefix.is_held = False
        self._touch(prefix)

    def drop(self, seq_id: int) -> None:
        """Give up a held id and forget its tokens."""
        self._in_cells[seq_id].is_held = False
        self._empty(seq_id)

    def evict(self) -> bool:
        """Park the prefix in cells that was not used for longest; False if there is none."""
        idle = self._idle_ids()
        if idle:
            self._park(idle[0])
        return bool(idle)

    def allow_parking(self, is_allowed: bool) -> None:
        """Let idle prefixes be parked as planned, or forget those that are and park no others."""
        self._parking_bytes = self._planned_bytes if is_allowed else 0
        if not is_allowed:
            self._parked.clear()

    @property
    def n_held(self) -> int:
        return sum(prefix.is_held for prefix in self._in_cells)

    @property
    def n_parked_bytes(self) -> int:
        return sum(prefix.n_bytes for prefix in self._parked)

    @property
    def idle_lengths(self) -> list[int]:
        """Return the tokens of each prefix that is kept and not in use."""
        idle = [prefix for prefix in self._in_cells if prefix.tokens and not prefix.is_held]
        return [len(prefix.tokens) for prefix in (*idle, *self._parked)]

    def _best_source(self, prompt: Seq[int]) -> tuple[_Prefix | None, int]:
        """Return the prefix that has most of prompt's beginning, and how much of it is usable."""
        best, n_best = None, 0
        for prefix in (*self._in_cells, *self._parked):
            if prefix.is_held and not self._can_cut:
                continue  # its state has moved on and belongs to a running sequence
            n = self._usable(prefix, min(_common(prefix.tokens, prompt), len(prompt) - 1))
            if n > n_best:
                best, n_best = prefix, n
        return best, n_best

    def _usable(self, prefix: _Prefix, n: int) -> int:
        """Return how many of the first n tokens of a prefix evaluation can go on from."""
        if not self._can_cut and n < len(prefix.tokens):
            n = max((at for at in prefix.snapshots if at <= n), default=0)
        if n <= 0:
            return 0
        if prefix.state is None:
            holds = self._memory.holds_window(self._seq_id(prefix), n)
        else:
            holds = self._memory.saves_window(len(prefix.tokens), n)
        return n if holds else 0

    def _takes_over(self, source: _Prefix, n_cached: int) -> bool:
        """Tell whether a prompt replaces the prefix that it begins with.

        A long conversation that shares only its beginning with the prompt is kept beside it, if
        there is room.
        """
        if source.is_held:
            return False
        is_lost = source.state is None and self._room_beside(source) < 0
        return is_lost or 2 * n_cached >= len(source.tokens)

    def _room_beside(self, prefix: _Prefix) -> int:
        """Return the bytes for others that are left once a prefix in cells is parked."""
        state_bytes = self._memory.state_bytes(self._seq_id(prefix))
        return self._parking_bytes - prefix.n_bytes - state_bytes

    def _spare_id(self, source: _Prefix | None) -> int:
        """Return an id with nothing under it, parking the oldest idle prefix if there is none."""
        free = [i for i, prefix in enumerate(self._in_cells) if not prefix.is_held]
        target = min(free, key=lambda i: self._age(self._in_cells[i], source))
        if self._in_cells[target].tokens:
            self._park(target)
        return target

    def _age(self, prefix: _Prefix, source: _Prefix | None) -> tuple[bool, bool, int]:
        return bool(prefix.tokens), prefix is source, prefix.used_at

    def _bring(self, source: _Prefix, target: int, n: int, *, takes_over: bool) -> bool:
        """Make target hold the first n tokens of source; False if that can't be done."""
        if source is self._in_cells[target]:
            return self._cut(target, n)
        self._empty(target)
        prefix = self._in_cells[target]
        if source.state is None and self._seq_id(source) < 0:
            return False  # there was no room to park it
        if source.state is None and self._can_cut:
            self._memory.copy(self._seq_id(source), target, n)
            prefix.tokens = source.tokens[:n]
            return True
        if not self._memory.saves_window(len(source.tokens), n):
            return False  # it was in cells, whole, and has been parked for this prompt
        state = source.state or self._memory.save(self._seq_id(source), whole=True)
        if not self._memory.restore(target, state, whole=True):
            return False
        prefix.tokens, prefix.snapshots = list(source.tokens), dict(source.snapshots)
        if takes_over:
            self._parked = [parked for parked in self._parked if parked is not source]
        return self._cut(target, n)

    def _cut(self, seq_id: int, n: int) -> bool:
        """Cut the prefix in cells under seq_id to its first n tokens."""
        prefix = self._in_cells[seq_id]
        if n == len(prefix.tokens):
            return True
        if not self._can_cut:
            if not self._memory.restore(seq_id, prefix.snapshots[n], whole=False):
                return False
            prefix.snapshots = {at: s for at, s in prefix.snapshots.items() if at <= n}
        del prefix.tokens[n:]
        return self._memory.remove(seq_id, n)

    def _park_idle(self, but: _Prefix | None = None) -> None:
        """Park the prefixes that are in cells and not held, except one and those it would cost."""
        for seq_id in self._idle_ids():
            prefix = self._in_cells[seq_id]
            if prefix is not but and not self._loses(prefix):
                self._park(seq_id)

    def _idle_ids(self) -> list[int]:
        """Return the ids whose tokens are in cells and not held, the least recently used first."""
        idle = [i for i, p in enumerate(self._in_cells) if p.tokens and not p.is_held]
        return sorted(idle, key=lambda i: self._in_cells[i].used_at)

    def _loses(self, prefix: _Prefix) -> bool:
        """Tell whether a prefix could no more be cut once it is parked.

        A saved state has only the last window of sliding-window layers.
        """
        n = len(prefix.tokens)
        return self._can_cut and not self._memory.saves_window(n, n - 1)

    def _park(self, seq_id: int) -> None:
        """Copy an idle prefix out of its cells; the oldest ones go where room is short.

        They go before, and a prefix that finds no room is not copied: there is no memory for it.
        """
        prefix = self._in_cells[seq_id]
        # What a longer prefix begins with is found there.
        self._parked = [p for p in self._parked if not _begins(p.tokens, prefix.tokens)]
        room_bytes = self._room_beside(prefix)
        while 0 <= room_bytes < self.n_parked_bytes and self._has_older(prefix):
            del self._parked[0]
        if self.n_parked_bytes <= room_bytes:
            prefix.state = self._memory.save(seq_id, whole=True)
            self._parked.append(prefix)
            self._parked.sort(key=lambda p: p.used_at)
        prefix.is_settled = False
        self._in_cells[seq_id] = _Prefix()
        self._memory.remove(seq_id)

    def _has_older(self, prefix: _Prefix) -> bool:
        return bool(self._parked) and self._parked[0].used_at < prefix.used_at

    def _empty(self, seq_id: int) -> None:
        """Forget what lies under seq_id; what comes there next is settled if it is alone."""
        self._memory.remove(seq_id)
        old = self._in_cells[seq_id]
        is_alone = True
        for other in self._in_cells:
            if other is not old and (other.tokens or other.is_held):
                other.is_settled = is_alone = False
        self._in_cells[seq_id] = _Prefix(is_held=old.is_held, is_settled=is_alone)

    def _seq_id(self, prefix: _Prefix) -> int:
        return next((i for i, p in enumerate(self._in_cells) if p is prefix), -1)

    def _touch(self, prefix: _Prefix) -> None:
        self._clock += 1
        prefix.used_at = self._clock


def _common(a: Seq[int], b: Seq[int]) -> int:
    """Return the length of the common prefix; compares blocks, a 12,000-token prompt is usual."""
    n, n_block = min(len(a), len(b)), 512
    for start in range(0, n, n_block):
        if a[start : start + n_block] != b[start : start + n_block]:
            stop = min(start + n_block, n)
            return next((i for i in range(start, stop) if a[i] != b[i]), stop)
    return n


def _begins(a: Seq[int], b: Seq[int]) -> bool:
    return len(a) <= len(b) and _common(a, b) == len(a)


def _least_useful(positions: Seq[int]) -> int:
    """Return the position whose loss leaves the smallest gap; the last one is always kept."""
    gaps = zip((0, *positions), positions, positions[1:], strict=False)
    return min(gaps, key=lambda gap: gap[2] - gap[0])[1]
