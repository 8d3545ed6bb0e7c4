"""How much memory the machine, or the container in it, has and can still give.

In: a directory that looks like /. Out: a Memory, true at that moment. Knows Linux, and macOS as far
as psutil does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.errors import EngineError
from headrace.engine.system_files import cgroup_levels, read_keyed, read_number

# Of what is available this share is left to others, within bounds: an interpreter that grows, page
# cache that can't be had back at once, the rest of the machine. A small machine is a container that
# runs little else, and the most would be a third of 1.5 GiB.
_HEADROOM_SHARE = 8
_LEAST_HEADROOM_BYTES = 192 << 20
_MOST_HEADROOM_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory and swap of the machine, and what its cgroups leave of them, in bytes."""

    physical_bytes: int
    available_bytes: int
    """What can be allocated before something is swapped, throttled or killed."""
    limit_bytes: int | None
    """The tightest limit of our cgroup and its ancestors; None: none is below physical_bytes."""
    swap_total_bytes: int
    swap_free_bytes: int
    missing_bytes: int = 0
    """What a cgroup uses beyond its limit, as it may for a while after the limit was lowered."""


def this_memory() -> Memory:
    """Return the memory of this machine as it is now."""
    if sys.platform == "darwin":
        import psutil  # only here: Linux tells more in its own files

        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return Memory(memory.total, memory.available, None, swap.total, swap.free)
    return read_memory(Path("/"))


def spare_bytes(available_bytes: int) -> int:
    """Return how much of available_bytes a model may take."""
    headroom = max(available_bytes // _HEADROOM_SHARE, _LEAST_HEADROOM_BYTES)
    return max(available_bytes - min(headroom, _MOST_HEADROOM_BYTES), 0)


def read_memory(root: Path) -> Memory:
    """Return the memory that the files below root tell of.

    Available is the least of the machine's MemAvailable and, for each cgroup from ours to the root,
    its limit less what is in use; inactive page cache counts as free. memory.high is a limit too:
    beyond it the kernel slows a process down until it is as good as stopped.

    Raises:
        EngineError: there is no MemTotal or no MemAvailable.

    Source: Linux, Documentation/filesystems/proc.rst, admin-guide/cgroup-v2.rst and
    admin-guide/cgroup-v1/memory.rst.
    """
    physical, available = _meminfo(root, "MemTotal"), _meminfo(root, "MemAvailable")
    is_v2, levels = cgroup_levels(root, "memory")
    limits = []
    for level in levels:
        limit = _limit_bytes(level, is_v2)
        if limit is not None:
            limits.append(limit)
            available = min(available, limit - _used_bytes(level, is_v2))
    limit = min(limits, default=physical)  # version 1 spells "none" as an enormous number
    swap = [read_keyed(root / "proc/meminfo", key) or 0 for key in ("SwapTotal:", "SwapFree:")]
    return Memory(
        physical_bytes=physical,
        available_bytes=max(available, 0),
        limit_bytes=limit if limit < physical else None,
        swap_total_bytes=swap[0] * 1024,
        swap_free_bytes=swap[1] * 1024,
        missing_bytes=max(-available, 0),
    )


def _meminfo(root: Path, name: str) -> int:
    path = root / "proc/meminfo"
    kib = read_keyed(path, f"{name}:")
    if kib is None:
        raise EngineError(f"{path} has no {name}, expected one as in Linux 3.14 or later")
    return kib * 1024


def _limit_bytes(level: Path, is_v2: bool) -> int | None:
    """Return the limit of the cgroup at level itself, or None."""
    names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
    limits = (read_number(level / name) for name in names)
    return min((n for n in limits if n is not None), default=None)


def _used_bytes(level: Path, is_v2: bool) -> int:
    """Return what the cgroup at level can't give back."""
    usage, inactive = (
        ("memory.current", "inactive_file")
        if is_v2
        else ("memory.usage_in_bytes", "total_inactive_file")
    )
    used = read_number(level / usage) or 0
    return max(0, used - (read_keyed(level / "memory.stat", inactive) or 0))
