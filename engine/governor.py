"""Keeps what a model can do without as large as there is memory for, within its plan.

In: readings of memory pressure, one a second between steps. Out: whether idle prefixes are parked,
the share of the planned cache of experts to use, and both made so. While memory is short prefixes
go first: what they cost is one prompt's time, not every step's. Shrinks at once and grows slowly.
Knows no experts and no tokens.
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
    """Decides from reading to reading; a share of 1 is the cache as planned, 0 bytes are none."""

    def __init__(self, planned_bytes: int, least_share: float) -> None:
        """Begin with the whole cache; less than least_share is of no use."""
        self.share = 1.0
        self.parks = True
        """Whether memory may be used for idle prefixes."""
        self.is_pressed = False
        """Whether the last reading told of pressure."""
        self._planned_bytes = planned_bytes
        self._least_share = min(least_share, 1.0)
        self._last: Reading | None = None
        self._pressed_s = float("-inf")
        self._grown_s = float("-inf")
        self._calm_s = _CALM_S

    def update(self, reading: Reading, parked_bytes: int = 0) -> float:
        """Return the share of the planned cache to use after reading.

        parked_bytes are what giving up the parked prefixes would free.
        """
        last, self._last = self._last, reading
        if last is None:
            return self.share
        missing_bytes = max(0, -reading.free_bytes)
        self.is_pressed = missing_bytes > 0 or _is_short(last, reading)
        if self.is_pressed:
            self._shrink(reading.at_s, missing_bytes, parked_bytes if self.parks else 0)
        elif self.share < 1:
            if self._may_grow(reading, _STEP * self._planned_bytes):
                self._grown_s = reading.at_s
                self.share = min(self.share + _STEP, 1.0)
        elif not self.parks:
            if self._may_grow(reading, 0):
                self._grown_s = reading.at_s
                self.parks = True
        elif reading.at_s - self._grown_s > _MOST_CALM_S:
            self._calm_s = _CALM_S
        return self.share

    def _shrink(self, at_s: float, missing_bytes: int, parked_bytes: int) -> None:
        if at_s - self._grown_s < self._calm_s:
            self._calm_s = min(2 * self._calm_s, _MOST_CALM_S)
        self._pressed_s = at_s
        self.parks = False
        if parked_bytes > missing_bytes or self._planned_bytes == 0:
            return  # the next reading tells whether that was enough
        step = max(_STEP, (missing_bytes - parked_bytes) / self._planned_bytes)
        self.share = max(self.share - step, self._least_share)

    def _may_grow(self, reading: Reading, n_bytes: float) -> bool:
        calm_since_s = max(self._pressed_s, self._grown_s)
        has_room = reading.free_bytes > n_bytes + _RESERVE_BYTES
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


class Prefixes(Protocol):
    """What is given up first: a KVCache's prefixes that are parked."""

    @property
    def n_parked_bytes(self) -> int: ...
    def allow_parking(self, is_allowed: bool) -> None: ...


class Watch:
    """Watches over the memory of one model; owns the gauge. Of the engine's thread."""

    def __init__(self, cache: Cache | None, gauge: Gauge) -> None:
        """Watch over cache, of which there may be none, and the prefixes that check is given."""
        self._cache = cache if cache is not None and cache.least_share < 1 else None
        self._gauge = gauge
        planned_bytes, least_share = 0, 1.0
        if self._cache is not None:
            planned_bytes, least_share = self._cache.planned_bytes, self._cache.least_share
        self._governor = Governor(planned_bytes, least_share)
        self._share = 1.0
        self._parked_bytes = 0
        """Of prefixes that were given up and not told of yet."""
        self._said = self._state = (1.0, True)
        self._next_s = self._changed_s = 0.0

    def check(self, prefixes: Prefixes) -> None:
        """Look if it is time to, and give up or take what memory asks for; between steps."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + PERIOD_S
        parked_bytes = prefixes.n_parked_bytes
        share = self._governor.update(self._gauge.read(), parked_bytes)
        if not self._governor.parks:
            self._parked_bytes += parked_bytes
        prefixes.allow_parking(self._governor.parks)
        if share != self._share:
            self._resize(share)
        state = self._share, self._governor.parks
        if state != self._state:
            self._state, self._changed_s = state, now_s
        if self._state != self._said and now_s - self._changed_s > _QUIET_S:
            self._say()

    @property
    def cache_share(self) -> float | None:
        """The part of the planned cache that is used; None: there is none that could shrink."""
        return None if self._cache is None else self._share

    def close(self) -> None:
        self._gauge.close()

    def _resize(self, share: float) -> None:
        assert self._cache is not None  # without one the share is always 1
        try:
            self._cache.resize(share)
            self._share = share
        except MemoryError as error:
            logger.debug("%s", error)
            self._governor.share = self._share

    def _say(self) -> None:
        """Tell how far it went, in one line."""
        is_shorter = self._state < self._said
        parts = []
        if self._state[0] != self._said[0] and self._cache is not None:
            size = self._share * self._cache.planned_bytes / 2**20
            parts.append(f"{size:.0f} MiB of experts are cached now")
        if self._state[1] != self._said[1]:
            what = "no longer kept" if is_shorter else "kept again"
            parts.append(f"prompts outside the context are {what}")
        if is_shorter and self._parked_bytes:
            parts[-1] += f", {self._parked_bytes / 2**20:.0f} MiB were"
        if is_shorter and self._cache is None:
            parts.append("nothing else can be given up while the model is loaded")
        logger.warning(
            "memory is %s: %s", "short" if is_shorter else "free again", ", ".join(parts)
        )
        self._said, self._parked_bytes = self._state, 0
