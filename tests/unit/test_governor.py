"""How much of the planned cache is used, reading by reading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.engine.governor import Governor
from headrace.engine.pressure import Reading

GIB = 1 << 30
CALM = Reading(at_s=0, stall_s=0, n_major_faults=0, n_alarms=0, free_bytes=2 * GIB)


def after(reading: Reading, seconds: float, **changes: Any) -> Reading:
    return replace(reading, at_s=reading.at_s + seconds, **changes)


def settled(governor: Governor, reading: Reading, seconds: int) -> Reading:
    """Let so many seconds pass in which nothing changes."""
    for _ in range(seconds):
        reading = after(reading, 1)
        governor.update(reading)
    return reading


def test_nothing_happens_while_nothing_is_short() -> None:
    governor = Governor(4 * GIB, 0.1)
    settled(governor, replace(CALM, free_bytes=0), 100)
    assert governor.share == 1


def test_each_sign_of_pressure_shrinks_by_a_step_down_to_the_least() -> None:
    signs: tuple[dict[str, Any], ...] = ({"n_alarms": 1}, {"stall_s": 0.2}, {"n_major_faults": 100})
    for sign in signs:
        governor = Governor(4 * GIB, 0.1)
        governor.update(CALM)
        assert governor.update(after(CALM, 1, **sign)) == 0.875
        assert governor.is_pressed
    governor, reading = Governor(4 * GIB, 0.3), CALM
    for i in range(20):
        reading = after(reading, 1, n_alarms=i)
        governor.update(reading)
    assert governor.share == 0.3


def test_some_waiting_and_some_faults_are_no_pressure() -> None:
    governor = Governor(4 * GIB, 0.1)
    governor.update(CALM)
    assert governor.update(after(CALM, 1, stall_s=0.05, n_major_faults=20)) == 1


def test_a_limit_below_what_is_in_use_shrinks_by_all_that_is_missing() -> None:
    governor = Governor(4 * GIB, 0.1)
    governor.update(CALM)
    assert governor.update(after(CALM, 1, free_bytes=-2 * GIB)) == 0.5


def test_parked_prefixes_go_before_the_cache_and_come_back_after_it() -> None:
    governor = Governor(4 * GIB, 0.1)
    governor.update(CALM)
    reading = after(CALM, 1, n_alarms=1)
    assert (governor.update(reading, GIB), governor.parks) == (1, False)
    reading = after(reading, 1, n_alarms=2)
    assert governor.update(reading) == 0.875
    reading = settled(governor, reading, 10)
    assert (governor.share, governor.parks) == (1, False)
    settled(governor, reading, 10)
    assert (governor.share, governor.parks) == (1, True)


def test_what_parked_prefixes_free_is_not_taken_from_the_cache() -> None:
    governor = Governor(4 * GIB, 0.1)
    governor.update(CALM)
    assert governor.update(after(CALM, 1, free_bytes=-3 * GIB), GIB) == 0.5
    assert not governor.parks


def test_without_a_cache_only_prefixes_are_given_up() -> None:
    governor = Governor(0, 1)
    governor.update(CALM)
    for i in range(1, 4):
        assert governor.update(after(CALM, i, n_alarms=i, free_bytes=-GIB)) == 1
        assert not governor.parks


def test_cache_grows_again_in_steps_once_it_was_calm_and_there_is_room() -> None:
    governor = Governor(4 * GIB, 0.1)
    governor.update(CALM)
    reading = after(CALM, 1, free_bytes=-2 * GIB)
    governor.update(reading)
    reading = settled(governor, replace(reading, free_bytes=GIB // 2), 60)
    assert governor.share == 0.5  # no room for a step and the reserve
    reading = settled(governor, replace(reading, free_bytes=GIB), 1)
    assert governor.share == 0.625
    reading = settled(governor, reading, 9)
    assert governor.share == 0.625
    settled(governor, reading, 31)
    assert governor.share == 1


def test_pressure_right_after_growing_makes_the_next_try_wait_longer() -> None:
    governor, reading = Governor(4 * GIB, 0.1), CALM
    waits = []
    for i in range(1, 4):
        governor.update(reading)
        reading = after(reading, 1, n_alarms=i)
        share = governor.update(reading)
        n = 0
        while governor.share == share:
            reading = settled(governor, reading, 1)
            n += 1
        waits.append(n)
    assert waits == [10, 20, 40]
