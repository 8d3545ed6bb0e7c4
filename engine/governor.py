"""Keeps the expert cache of a streamed model as large as there is memory for, within its plan.

In: readings of memory pressure, one a second between steps. Out: the share of the planned cache to
use, and a cache of that size. Shrinks at once and grows slowly. Knows no experts.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from headrace.engine.pressure import Gauge, Reading

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
# So long after the last step of shrinking it is said how far it went.
_QUIET_S = 3.0
# Of the planned cache, at a time.
_STEP = 0.125
# Something waited for memory in more than this share of the time, or so many pages were read anew.
_MOST_STALL = 0.1
_MOST_FAULTS_PER_S = 50
# Grown again after so long without pressure, twice as long each time that it came back at once.
_CALM_S = 10.0
_MOST_CALM_S = 160.0
# What must be free beside what is grown by.
_RESERVE_BYTES = 256 << 20


class Governor:
    """Decides from reading to reading; a share of 1 is the cache as planned."""

    def __init__(self, planned_bytes: int, least_share: float) -> None:
        """Begin with the whole cache; less than least_share is of no use."""
        self.share = 1.0
        self.is_pressed = False
        """Whether the last reading told of pressure."""
        self._planned_bytes = planned_bytes
        self._least_share = min(least_share, 1.0)
        self._last: Reading | None = None
        self._pressed_s = float("-inf")
        self._grown_s = float("-inf")
        self._calm_s = _CALM_S

    def update(self, reading: Reading) -> float:
        """Return the share of the planned cache to use after reading."""
        last, self._last = self._last, reading
        if last is None:
            return self.share
        missing_bytes = max(0, -reading.free_bytes)
        self.is_pressed = missing_bytes > 0 or _is_short(last, reading)
        if self.is_pressed:
            if reading.at_s - self._grown_s < self._calm_s:
                self._calm_s = min(2 * self._calm_s, _MOST_CALM_S)
            self._pressed_s = reading.at_s
            step = max(_STEP, missing_bytes / self._planned_bytes)
            self.share = max(self.share - step, self._least_share)
        elif self.share < 1 and self._may_grow(reading):
            self._grown_s = reading.at_s
            self.share = min(self.share + _STEP, 1.0)
        elif self.share == 1 and reading.at_s - self._grown_s > _MOST_CALM_S:
            self._calm_s = _CALM_S
        return self.share

    def _may_grow(self, reading: Reading) -> bool:
        calm_since_s = max(self._pressed_s, self._grown_s)
        step_bytes = _STEP * self._planned_bytes
        has_room = reading.free_bytes > step_bytes + _RESERVE_BYTES
        return has_room and reading.at_s - calm_since_s >= self._calm_s


def _is_short(last: Reading, now: Reading) -> bool:
    seconds = max(now.at_s - last.at_s, 1e-3)
    return (
        now.n_alarms > last.n_alarms
        or now.stall_s - last.stall_s > _MOST_STALL * seconds
        or now.n_major_faults - last.n_major_faults > _MOST_FAULTS_PER_S * seconds
    )


class Cache(Protocol):
    """What is kept as large as memory allows: a WeightStream's records."""

    @property
    def planned_bytes(self) -> int: ...
    @property
    def least_share(self) -> float: ...
    def resize(self, share: float) -> None: ...


class Watch:
    """Watches over the memory of one cache; owns the gauge. Of the engine's thread."""

    def __init__(self, cache: Cache, gauge: Gauge) -> None:
        self._cache = cache
        self._gauge = gauge
        self._governor = Governor(cache.planned_bytes, cache.least_share)
        self._share = self._said = 1.0
        self._next_s = self._changed_s = 0.0

    def check(self) -> None:
        """Resize the cache if it is time to look and memory asks for it; between steps."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + PERIOD_S
        share = self._governor.update(self._gauge.read())
        if share != self._share:
            self._changed_s = now_s
            try:
                self._cache.resize(share)
            except MemoryError as error:
                logger.debug("%s", error)
                share = self._governor.share = self._share
            self._share = share
        if self._share != self._said and now_s - self._changed_s > _QUIET_S:
            what = "memory is short" if self._share < self._said else "memory is free again"
            size = self._share * self._cache.planned_bytes / 2**20
            logger.warning("%s: %.0f MiB of experts are cached now", what, size)
            self._said = self._share

    def close(self) -> None:
        self._gauge.close()
