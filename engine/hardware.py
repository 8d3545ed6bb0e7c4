"""What the machine, or the container in it, lets this process use: CPUs and memory.

Comes in: a directory that looks like / and the CPUs that the process may run on. Goes out: a
Topology, and the bytes that can be allocated. All functions are pure over that directory, so a
recorded tree tells the same as the machine did. Knows Linux only; where its files are missing or
senseless, every CPU counts as a core of its own, without quota.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headrace.engine.errors import EngineError

# Linux, arch/x86/Kconfig: NR_CPUS is at most 8192; a larger number in a list is garbage
_MAX_CPUS = 8192
# A core this much slower than the fastest still finishes its share of a matrix product in time.
_PERFORMANCE_CAPACITY = 0.75


class CoreKind(enum.Enum):
    """How fast a core is beside the fastest that this process may use."""

    PERFORMANCE = "performance"
    EFFICIENCY = "efficiency"


@dataclass(frozen=True, slots=True)
class Cpu:
    """A logical CPU; core is the lowest CPU of its physical core, unique over all sockets."""

    index: int
    core: int
    siblings: tuple[int, ...]
    """The CPUs (SMT threads) of its core, itself included, allowed to this process or not."""
    kind: CoreKind


@dataclass(frozen=True, slots=True)
class Topology:
    """The CPUs that this process may run on, in order, and how much of them it may use."""

    cpus: tuple[Cpu, ...]
    quota_cpus: float | None
    """CPU seconds per second that the cgroups grant; None: no quota."""

    @property
    def physical_performance_cpus(self) -> tuple[int, ...]:
        """One CPU, the lowest, of each performance core."""
        first_of_core: dict[int, int] = {}
        for cpu in self.cpus:
            if cpu.kind is CoreKind.PERFORMANCE:
                first_of_core.setdefault(cpu.core, cpu.index)
        return tuple(first_of_core.values())

    @property
    def efficiency_cpus(self) -> tuple[int, ...]:
        """The CPUs of efficiency cores; empty where all cores are alike."""
        return tuple(cpu.index for cpu in self.cpus if cpu.kind is CoreKind.EFFICIENCY)

    @property
    def default_threads(self) -> int:
        """Compute threads that neither share a core, nor wait for a slow one, nor are throttled."""
        quota = math.inf if self.quota_cpus is None else math.floor(self.quota_cpus)
        return int(max(1, min(len(self.physical_performance_cpus), quota)))


def this_machine() -> Topology:
    """Return the topology of the CPUs that this process may run on."""
    return read_topology(Path("/"), frozenset(os.sched_getaffinity(0)))


def read_topology(root: Path, affinity: frozenset[int]) -> Topology:
    """Return the topology below root of the CPUs in affinity (os.sched_getaffinity).

    Source: Linux, Documentation/admin-guide/cputopology.rst.
    """
    performance = _performance_cpus(root, affinity)
    cpus = []
    for index in sorted(affinity):
        siblings = _siblings(root, index)
        kind = CoreKind.PERFORMANCE if index in performance else CoreKind.EFFICIENCY
        cpus.append(Cpu(index, min(siblings), siblings, kind))
    return Topology(tuple(cpus), _quota_cpus(root))


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a list as the kernel prints it: "0-3,8,10-11"; blank is none.

    Raises:
        ValueError: text is not such a list, or names a CPU from 8192 on.

    Source: Linux, Documentation/admin-guide/cputopology.rst and bitmap_print_to_pagebuf.
    """
    cpus: set[int] = set()
    for item in text.strip().split(",") if text.strip() else []:
        first, dash, last = item.partition("-")
        low, high = _whole(first), _whole(last if dash else first)
        if low is None or high is None or not low <= high < _MAX_CPUS:
            raise ValueError(f'CPU list has "{item}", expected numbers and ranges such as "0-3,8"')
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def available_memory_bytes(root: Path) -> int:
    """Return the bytes that can be allocated before something is swapped, throttled or killed.

    It is the least of the machine's MemAvailable and, for each cgroup from ours to the root, its
    limit less what is in use; inactive page cache counts as free. memory.high is a limit too:
    beyond it the kernel slows a process down until it is as good as stopped.

    Raises:
        EngineError: there is no MemAvailable.

    Source: Linux, Documentation/filesystems/proc.rst, admin-guide/cgroup-v2.rst and
    admin-guide/cgroup-v1/memory.rst.
    """
    path = root / "proc/meminfo"
    available_kib = _keyed(path, "MemAvailable:")
    if available_kib is None:
        raise EngineError(f"{path} has no MemAvailable, expected one as in Linux 3.14 or later")
    is_v2, levels = cgroup_levels(root, "memory")
    free = [_cgroup_free_bytes(level, is_v2) for level in levels]
    return max(0, min([available_kib * 1024, *(n for n in free if n is not None)]))


def _performance_cpus(root: Path, cpus: frozenset[int]) -> Set[int]:
    """Return the fast ones of cpus: never none of them, and all where they are alike.

    Hybrid x86 lists its P cores, and its E cores elsewhere (cpu_atom, cpu_lowpower). ARM gives
    each CPU a capacity of up to 1024: the prime and the big cores are performance.

    Source: Linux, tools/perf/Documentation/intel-hybrid.txt and
    Documentation/ABI/testing/sysfs-devices-system-cpu, cpu_capacity.
    """
    listed = _read_cpu_list(root / "sys/devices/cpu_core/cpus") & cpus
    if listed:
        return listed
    folder = root / "sys/devices/system/cpu"
    read = {cpu: _whole(_text(folder / f"cpu{cpu}/cpu_capacity")) for cpu in cpus}
    capacity = {cpu: amount for cpu, amount in read.items() if amount is not None}
    fastest = max(capacity.values(), default=0)
    slow = {cpu for cpu, n in capacity.items() if n < _PERFORMANCE_CAPACITY * fastest}
    return cpus - slow


def _siblings(root: Path, cpu: int) -> tuple[int, ...]:
    """Return the CPUs of cpu's core in order; only cpu where the kernel does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    # The second is the name up to Linux 5.2, kept since.
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = _read_cpu_list(topology / name)
        if cpu in siblings:
            return tuple(sorted(siblings))
    return (cpu,)


def _quota_cpus(root: Path) -> float | None:
    """Return the smallest CPU quota of our cgroup and its ancestors.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, cpu.max, and
    Documentation/scheduler/sched-bwc.rst.
    """
    is_v2, levels = cgroup_levels(root, "cpu")
    quotas = []
    for level in levels:
        if is_v2:
            quota_us, _, period_us = _text(level / "cpu.max").partition(" ")
        else:
            quota_us, period_us = (
                _text(level / "cpu.cfs_quota_us"),
                _text(level / "cpu.cfs_period_us"),
            )
        quota, period = _whole(quota_us), _whole(period_us)
        if quota and period:  # no quota is "max" in v2 and -1 in v1
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cgroup_free_bytes(level: Path, is_v2: bool) -> int | None:
    """Return what the cgroup at level may still allocate; None: it has no limit."""
    if is_v2:
        limits = [_whole(_text(level / name)) for name in ("memory.max", "memory.high")]
        usage, inactive = "memory.current", "inactive_file"
    else:
        limits = [_whole(_text(level / "memory.limit_in_bytes"))]
        usage, inactive = "memory.usage_in_bytes", "total_inactive_file"
    limit = min((n for n in limits if n is not None), default=None)
    if limit is None:
        return None
    used = _whole(_text(level / usage)) or 0
    return limit - max(0, used - (_keyed(level / "memory.stat", inactive) or 0))


def cgroup_levels(root: Path, controller: str) -> tuple[bool, list[Path]]:
    """Return whether controller is in cgroup v2, and the folders of our cgroup and its ancestors.

    In a container the path may be the host's, while its own cgroup is mounted as the root: the
    folders that don't exist there hold no limit, and the root, which is in the list, does.

    Source: Linux, cgroups(7), /proc/pid/cgroup; the mount points are systemd's.
    """
    mounts = root / "sys/fs/cgroup"
    is_v2, base, path = True, mounts, "/"
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        names, _, line_path = rest.partition(":")
        if controller in names.split(","):
            is_v2, path = False, line_path
            base = mounts / names if (mounts / names).is_dir() else mounts / controller
            break
        if hierarchy == "0" and not names:
            path = line_path
            base = mounts / "unified" if (mounts / "unified").is_dir() else mounts
    parts = PurePosixPath(path.lstrip("/")).parts
    if ".." in parts:  # a cgroup outside the namespace, of which nothing is mounted
        parts = ()
    return is_v2, [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _read_cpu_list(path: Path) -> frozenset[int]:
    try:
        return parse_cpu_list(_text(path))
    except ValueError:
        return frozenset()


def _keyed(path: Path, key: str) -> int | None:
    """Return the number after key in a file of lines "key number"."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == key:
            return _whole(words[1])
    return None


def _whole(text: str) -> int | None:
    """Return the number that text spells, not negative; None: it spells none."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _text(path: Path) -> str:
    """Return what the file at path holds, stripped; nothing where there is no such file."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
