"""Prefixes are reused only where their tokens really are in the cells.

The memory under test has numbered cells with tokens in them; what the cache claims is compared
with what lies there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.kv_cache import MAX_SETTLED_TOKENS, MAX_SNAPSHOTS, KVCache


class Cells:
    """A memory that can be cut anywhere, as attention's; the lowest free cells are taken first."""

    def __init__(self, n_seqs: int, n_cells: int = 1 << 14) -> None:
        self.n_cells = n_cells
        self.cells: dict[int, int] = {}
        """Cell → token."""
        self.places: list[list[int]] = [[] for _ in range(n_seqs)]
        """For each sequence id, the cells of its positions."""

    def tokens(self, seq_id: int) -> list[int]:
        return [self.cells[place] for place in self.places[seq_id]]

    @property
    def n_free(self) -> int:
        return self.n_cells - len(self.cells)

    def evaluate(self, seq_id: int, tokens: Seq[int]) -> None:
        assert len(tokens) <= self.n_free
        free = (i for i in range(self.n_cells) if i not in self.cells)
        places = list(islice(free, len(tokens)))
        self.cells.update(zip(places, tokens, strict=True))
        self.places[seq_id] += places

    def remove(self, seq_id: int, first: int = 0) -> bool:
        del self.places[seq_id][first:]
        used = {place for places in self.places for place in places}
        self.cells = {place: token for place, token in self.cells.items() if place in used}
        return True

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        # llama.cpp adds cells to what the target has; positions must not be there twice.
        assert not self.places[target]
        assert n_tokens <= len(self.places[source])
        self.places[target] = self.places[source][:n_tokens]

    def holds_window(self, seq_id: int, n_tokens: int) -> bool:
        return True

    def saves_window(self, n_saved: int, n_tokens: int) -> bool:
        return True

    def state_bytes(self, seq_id: int) -> int:
        return len(json.dumps(self.tokens(seq_id)))

    def save(self, seq_id: int, *, whole: bool) -> bytearray:
        assert whole, "cells need no snapshots"
        return bytearray(json.dumps(self.tokens(seq_id)).encode())

    def restore(self, seq_id: int, state: bytearray, *, whole: bool) -> bool:
        assert whole and not self.places[seq_id]
        tokens = json.loads(state)
        if len(tokens) > self.n_free:
            return False
        self.evaluate(seq_id, tokens)
        return True


class States(Cells):
    """A memory with one state for each sequence, as a recurrent model's."""

    def remove(self, seq_id: int, first: int = 0) -> bool:
        if 0 < first < len(self.places[seq_id]):
            return False
        return super().remove(seq_id, first)

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        raise AssertionError("a state that has moved on is of no use to others")

    def save(self, seq_id: int, *, whole: bool) -> bytearray:
        return super().save(seq_id, whole=True)

    def restore(self, seq_id: int, state: bytearray, *, whole: bool) -> bool:
        super().remove(seq_id)
        return super().restore(seq_id, state, whole=True)


class Windows(Cells):
    """A memory with a sliding window: what is saved of a sequence has the window of its end."""

    n_window = 3

    def __init__(self, n_seqs: int, n_cells: int = 1 << 14) -> None:
        super().__init__(n_seqs, n_cells)
        self.first = [0] * n_seqs
        """For each sequence id, the first position that later ones can look at."""

    def remove(self, seq_id: int, first: int = 0) -> bool:
        if not first:
            self.first[seq_id] = 0
        return super().remove(seq_id, first)

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        super().copy(source, target, n_tokens)
        self.first[target] = self.first[source]

    def holds_window(self, seq_id: int, n_tokens: int) -> bool:
        return self.first[seq_id] <= max(0, n_tokens - self.n_window)

    def saves_window(self, n_saved: int, n_tokens: int) -> bool:
        return n_saved <= self.n_window or n_tokens >= n_saved

    def restore(self, seq_id: int, state: bytearray, *, whole: bool) -> bool:
        if not super().restore(seq_id, state, whole=whole):
            return False
        self.first[seq_id] = max(0, len(self.places[seq_id]) - self.n_window)
        return True


# Two kinds of token and few beginnings: prompts that share prefixes, extend or contradict others.
prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.builds(
        lambda n, tail: [0] * n + tail, st.integers(1, 12), st.lists(st.integers(0, 1), max_size=8)
    ),
)
N_SEQS, N_CELLS, PARKING_BYTES = 4, 48, 150


class CacheOnCells(RuleBasedStateMachine):
    """What an engine does to its cache, in any order."""

    kind = Cells
    parks_all = True
    """Whether an idle prefix can leave the cells without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = self.kind(N_SEQS, N_CELLS)
        can_cut = self.kind is not States
        self.cache = KVCache(self.memory, N_SEQS, can_cut=can_cut, parking_bytes=PARKING_BYTES)
        self.held: dict[int, list[int]] = {}

    def choose(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)))

    @precondition(lambda self: len(self.held) < N_SEQS)
    @rule(prompt=prompts)
    def acquire(self, prompt: list[int]) -> None:
        seq_id, n_cached = self.cache.acquire(prompt)
        assert seq_id not in self.held
        assert n_cached < len(prompt)
        assert self.memory.holds_window(seq_id, n_cached)
        if not self.held and self.parks_all:  # one that runs alone has all cells for itself
            assert len(self.memory.cells) == n_cached
        self.held[seq_id] = prompt[:n_cached]

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(), saves=st.booleans(),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
    )  # fmt: skip
    def extend(self, data: st.DataObject, tokens: list[int], saves: bool) -> None:
        seq_id = self.choose(data)
        if self.memory.n_free >= len(tokens):
            self.memory.evaluate(seq_id, tokens)
            self.cache.extend(seq_id, tokens, saves=saves)
            self.held[seq_id] += tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=prompts)
    def rewind(self, data: st.DataObject, tokens: list[int]) -> None:
        seq_id = self.choose(data)
        n = self.cache.rewind(seq_id, tokens)
        assert n < len(tokens)
        assert self.held[seq_id][:n] == tokens[:n]
        assert self.memory.holds_window(seq_id, n)
        self.held[seq_id] = tokens[:n]

    @rule(is_allowed=st.booleans())
    def allow_parking(self, is_allowed: bool) -> None:
        self.cache.allow_parking(is_allowed)
        assert is_allowed or self.cache.n_parked_bytes == 0

    @precondition(lambda self: len(self.held) == 1)
    @rule()
    def settle(self) -> None:
        (seq_id,) = self.held
        self.cache.settle(seq_id)
        if self.parks_all:
            assert self.memory.places[seq_id] == list(range(len(self.held[seq_id])))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keeps=st.booleans())
    def leave(self, data: st.DataObject, keeps: bool) -> None:
        seq_id = self.choose(data)
        del self.held[seq_id]
        if keeps:
            self.cache.release(seq_id)
        else:
            self.cache.drop(seq_id)
            assert not self.memory.places[seq_id]

    @rule()
    def evict(self) -> None:
        is_idle = any(places for i, places in enumerate(self.memory.places) if i not in self.held)
        assert self.cache.evict() == is_idle

    @invariant()
    def held_ids_are_those_of_running_sequences(self) -> None:
        assert self.cache.n_held == len(self.held)

    @invariant()
    def cells_of_running_sequences_have_their_tokens(self) -> None:
        for seq_id, tokens in self.held.items():
            assert self.memory.tokens(seq_id) == tokens

    @invariant()
    def parked_prefixes_keep_to_their_room(self) -> None:
        assert self.cache.n_parked_bytes <= PARKING_BYTES

    @invariant()
    def no_prefix_is_empty(self) -> None:
        assert 0 not in self.cache.idle_lengths


class CacheOnWindows(CacheOnCells):
    """The same on a memory with a sliding window."""

    kind = Windows
    parks_all = False


class CacheOnStates(CacheOnCells):
    """The same on a memory that can't be cut."""

    kind = States


TestCacheOnCells = CacheOnCells.TestCase
TestCacheOnWindows = CacheOnWindows.TestCase
TestCacheOnStates = CacheOnStates.TestCase
for test in (TestCacheOnCells, TestCacheOnWindows, TestCacheOnStates):
    test.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def run(cache: KVCache, memory: Cells, tokens: list[int]) -> int:
    """Evaluate tokens as a request of its own; return how many were cached."""
    seq_id, n_cached = cache.acquire(tokens)
    memory.evaluate(seq_id, tokens[n_cached:])
    cache.extend(seq_id, tokens[n_cached:])
    cache.release(seq_id)
    return n_cached


def evaluate(cache: KVCache, memory: Cells, seq_id: int, tokens: Seq[int]) -> None:
    memory.evaluate(seq_id, tokens)
    cache.extend(seq_id, list(tokens), saves=True)


def test_the_same_prompt_leaves_its_last_token_to_evaluate() -> None:
    memory = Cells(2)
    cache = KVCache(memory, 2, can_cut=True)
    assert [run(cache, memory, [1, 2, 3]), run(cache, memory, [1, 2, 3])] == [0, 2]


@pytest.mark.parametrize("n", [511, 512, 513, 1500])
def test_long_prompts_are_compared_to_the_token(n: int) -> None:
    memory = Cells(2)
    cache = KVCache(memory, 2, can_cut=True)
    run(cache, memory, list(range(2000)))
    assert run(cache, memory, [*range(n), -1, *range(n, 2000)]) == n


def test_conversations_that_take_turns_all_keep_their_tokens() -> None:
    memory = Cells(2)
    cache = KVCache(memory, 2, can_cut=True)
    talks = [[i, *range(10, 40)] for i in range(6)]
    for turn in range(3):
        for talk in talks:
            assert run(cache, memory, talk) == (len(talk) - 5 if turn else 0)
            talk += range(5)


def test_a_prompt_that_shares_only_the_beginning_leaves_a_long_conversation_whole() -> None:
    memory = Cells(2)
    cache = KVCache(memory, 2, can_cut=True)
    talk = list(range(100))
    run(cache, memory, talk)
    assert run(cache, memory, [*range(10), -1]) == 10
    assert run(cache, memory, [*talk, -2]) == 100


def test_the_tokens_of_a_running_sequence_are_shared() -> None:
    memory = Cells(2)
    cache = KVCache(memory, 2, can_cut=True)
    first, _ = cache.acquire([1, 2, 3])
    evaluate(cache, memory, first, [1, 2, 3])
    second, n_cached = cache.acquire([1, 2, 9])
    assert (n_cached, second == first) == (2, False)
    assert memory.tokens(first) == [1, 2, 3]
    assert len(memory.cells) == 3


def test_the_least_recently_used_prefix_makes_room() -> None:
    memory = Cells(1)
    n_bytes = len(json.dumps([1, 1, 1]))
    cache = KVCache(memory, 1, can_cut=True, parking_bytes=2 * n_bytes + 5)
    for talk in ([1, 1, 1], [2, 2, 2], [1, 1, 1], [3, 3, 3], [4]):
        run(cache, memory, talk)
    assert run(cache, memory, [2, 2, 2]) == 0
    assert run(cache, memory, [1, 1, 1]) == 2


class Watched(Cells):
    """A memory that knows what is parked when it copies more."""

    cache: KVCache
    most_bytes = 0

    def save(self, seq_id: int, *, whole: bool) -> bytearray:
        state = super().save(seq_id, whole=whole)
        self.most_bytes = max(self.most_bytes, self.cache.n_parked_bytes + len(state))
        return state


def test_room_is_made_before_a_prefix_is_copied_into_it() -> None:
    memory = Watched(1)
    room_bytes = 2 * len(json.dumps([1, 1, 1])) + 5
    memory.cache = cache = KVCache(memory, 1, can_cut=True, parking_bytes=room_bytes)
    for talk in ([1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]):
        run(cache, memory, talk)
    assert 0 < memory.most_bytes <= room_bytes


def test_a_prefix_larger_than_all_room_is_not_copied_and_costs_no_other() -> None:
    memory = Watched(1)
    room_bytes = len(json.dumps([1] * 10))
    memory.cache = cache = KVCache(memory, 1, can_cut=True, parking_bytes=room_bytes)
    for talk in ([1] * 5, [2] * 20, [3]):
        run(cache, memory, talk)
    assert memory.most_bytes <= room_bytes
    assert run(cache, memory, [1] * 5) == 4


def test_a_beginning_is_shared_even_if_there_is_no_room_for_the_rest_of_it() -> None:
    memory = Cells(1)
    cache = KVCache(memory, 1, can_cut=True, parking_bytes=0)
    run(cache, memory, [1] * 10)
    assert run(cache, memory, [1, 1, 1, 2]) == 3
    assert cache.idle_lengths == [4]


def test_a_parked_prefix_that_finds_no_room_in_the_cells_is_evaluated_anew() -> None:
    memory = Cells(2, n_cells=12)
    cache = KVCache(memory, 2, can_cut=True)
    run(cache, memory, [1] * 8)
    long, _ = cache.acquire([2] * 9)
    evaluate(cache, memory, long, [2] * 9)
    seq_id, n_cached = cache.acquire([1] * 9)
    assert (n_cached, memory.tokens(seq_id)) == (0, [])


def test_a_short_sequence_wants_company_only_beside_many_cells_of_others() -> None:
    memory = Cells(3)
    cache = KVCache(memory, 3, can_cut=True)
    first, _ = cache.acquire([1])
    evaluate(cache, memory, first, [1] * 10)
    assert not cache.wants_company(first)
    second, _ = cache.acquire([2])
    evaluate(cache, memory, second, [2] * MAX_SETTLED_TOKENS)
    assert cache.wants_company(first)
    assert cache.wants_company(second)
    evaluate(cache, memory, second, [2])
    assert not cache.wants_company(second)  # it is long enough to see that many cells alone


def test_a_prefix_whose_window_is_gone_is_not_reused() -> None:
    memory = Windows(2)
    cache = KVCache(memory, 2, can_cut=True)
    run(cache, memory, [1, 2, 3, 4, 5])
    memory.first = [1, 1]
    assert run(cache, memory, [1, 2, 3, 9]) == 0
    run(cache, memory, [1, 2, 3, 4, 5])
    memory.first = [1, 1]
    assert run(cache, memory, [1, 2, 3, 4, 9]) == 4


def test_a_parked_prefix_with_a_window_goes_on_only_from_its_end() -> None:
    memory = Windows(1)
    cache = KVCache(memory, 1, can_cut=True)
    for talk in ([1, 2, 3, 4, 5], [9]):
        run(cache, memory, talk)
    assert run(cache, memory, [1, 2, 3, 4, 8]) == 0
    run(cache, memory, [9])
    assert run(cache, memory, [1, 2, 3, 4, 8, 6]) == 5


def test_a_sequence_stays_where_it_is_beside_cells_that_it_shares() -> None:
    memory = Windows(2, n_cells=10)
    cache = KVCache(memory, 2, can_cut=True)
    first, _ = cache.acquire([0] * 4 + [1] * 3)
    evaluate(cache, memory, first, [0] * 4 + [1] * 2)
    second, n_cached = cache.acquire([0] * 4 + [2] * 5)
    evaluate(cache, memory, second, [2] * 4)
    cache.release(first)
    cache.settle(second)
    assert n_cached == 4
    assert memory.tokens(second) == [0] * 4 + [2] * 4
    assert memory.n_free == 0


def test_a_state_goes_on_from_its_end_or_from_a_snapshot() -> None:
    memory = States(2)
    cache = KVCache(memory, 2, can_cut=False)
    seq_id, _ = cache.acquire(list(range(30)))
    for chunk in (range(10), range(10, 20), range(20, 30)):
        evaluate(cache, memory, seq_id, chunk)
    cache.release(seq_id)
    assert run(cache, memory, [*range(30), 99]) == 30
    assert run(cache, memory, [*range(25), 99]) == 20
    assert run(cache, memory, [0, 99]) == 0


def test_a_rewound_state_forgets_the_snapshots_of_what_it_lost() -> None:
    memory = States(1)
    cache = KVCache(memory, 1, can_cut=False)
    seq_id, _ = cache.acquire([1, 2, 3])
    evaluate(cache, memory, seq_id, [1])
    evaluate(cache, memory, seq_id, [2])
    assert cache.rewind(seq_id, [1, 5, 6, 7]) == 1
    memory.evaluate(seq_id, [5, 6])
    cache.extend(seq_id, [5, 6])
    assert cache.rewind(seq_id, [1, 5, 8]) == 1
    assert memory.tokens(seq_id) == [1]


def test_snapshots_of_a_long_prompt_are_few_and_spread_over_it() -> None:
    memory = States(1)
    cache = KVCache(memory, 1, can_cut=False)
    seq_id, _ = cache.acquire(list(range(6400)))
    for first in range(0, 6400, 64):
        evaluate(cache, memory, seq_id, range(first, first + 64))
    cache.release(seq_id)
    kept, n = [], 6399
    while n_cached := run(cache, memory, [*range(n), -1]):
        kept.append(n_cached)
        n = n_cached - 1
    assert len(kept) == MAX_SNAPSHOTS - 1  # the state's own end is the last of them
    assert max(a - b for a, b in zip(kept, [*kept[1:], 0], strict=True)) <= 2048


def test_while_memory_is_short_idle_prefixes_are_forgotten_and_nothing_is_saved() -> None:
    memory = Cells(2)
    cache = KVCache(memory, 2, can_cut=True)
    for prompt in ([1, 2, 3, 4, 5], [6, 7, 8]):
        run(cache, memory, prompt)
    assert cache.n_parked_bytes > 0 and cache.idle_lengths == [3, 5]
    cache.allow_parking(False)
    assert cache.n_parked_bytes == 0 and cache.idle_lengths == [3]
    cache.release(cache.acquire([9])[0])
    assert cache.idle_lengths == []
