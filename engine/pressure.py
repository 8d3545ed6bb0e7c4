"""Whether this process is short of memory: what the kernel says of stalls, not of free bytes alone.

In: a directory that looks like /. Out: Readings. Knows Linux; elsewhere nothing is ever short.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.memory import read_memory, this_memory
from headrace.engine.system_files import cgroup_levels, read_text


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one moment; all but free_bytes only ever grow."""

    at_s: float
    stall_s: float
    """Time in which something in our cgroup waited for memory."""
    n_major_faults: int
    """Pages of this process that had to be read again after the kernel took them."""
    n_alarms: int
    """Times that the kernel could hardly find memory to take in our cgroup."""
    free_bytes: int
    """Negative: so much more is in use than a limit allows."""


class Gauge:
    """Reads the pressure on memory; owns a few descriptors."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._is_v2, self._levels = cgroup_levels(root, "memory")
        self._n_alarms = 0
        self._alarms = [] if self._is_v2 else list(_alarms(self._levels))

    def read(self) -> Reading:
        """Return the reading of now."""
        for alarm in self._alarms:
            with contextlib.suppress(BlockingIOError):
                self._n_alarms += os.eventfd_read(alarm)
        memory = read_memory(self._root) if sys.platform == "linux" else this_memory()
        return Reading(
            at_s=time.monotonic(),
            stall_s=self._stall_s(),
            n_major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
            n_alarms=self._n_alarms,
            free_bytes=memory.available_bytes - memory.missing_bytes,
        )

    def close(self) -> None:
        for alarm in self._alarms:
            os.close(alarm)
        self._alarms = []

    def _stall_s(self) -> float:
        """Return the time that our cgroup waited; the machine's says what others suffer.

        Source: Linux, Documentation/accounting/psi.rst; version 1 has none of a cgroup.
        """
        if not self._is_v2:
            return 0.0
        names = [level / "memory.pressure" for level in self._levels[:1]]
        for path in (*names, self._root / "proc/pressure/memory"):
            for line in read_text(path).splitlines():
                kind, *fields = line.split()
                totals = [field[6:] for field in fields if field.startswith("total=")]
                if kind == "some" and totals:
                    return int(totals[0]) / 1e6
        return 0.0


def _alarms(levels: list[Path]) -> Iterator[int]:
    """Yield event descriptors that the kernel counts critical pressure of the levels in.

    Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst, Memory Pressure. Lowering a limit
    is such pressure, if what is in use does not fit it; only root may ask for it.
    """
    if sys.platform != "linux":
        return
    for level in levels:
        with contextlib.suppress(OSError):
            alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            try:
                with (level / "memory.pressure_level").open("rb") as pressure:
                    text = f"{alarm} {pressure.fileno()} critical"
                    (level / "cgroup.event_control").write_text(text)
            except OSError:
                os.close(alarm)
                raise
            yield alarm
