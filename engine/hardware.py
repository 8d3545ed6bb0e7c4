"""The CPUs that the machine, or the container in it, lets this process use.

Comes in: a directory that looks like / and the CPUs that the process may run on. Goes out: a
Topology. All functions are pure over that directory, so a recorded tree tells the same as the
machine did. Where its files are missing or senseless, every CPU counts as a core of its own,
without quota.
"""

from __future__ import annotations

import enum
import math
import os
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from headrace.engine import darwin
from headrace.engine.system_files import cgroup_levels, parse_number, read_number, read_text

# Linux, arch/x86/Kconfig: NR_CPUS is at most 8192; a larger number in a list is garbage
_MAX_CPUS = 8192
# A core this much slower than the fastest still finishes its share of a matrix product in time.
_PERFORMANCE_CAPACITY = 0.75
# /proc/cpuinfo of x86, and of ARM.
_CPU_MODEL_KEYS = (
    "vendor_id", "cpu family", "model", "stepping", "flags",
    "CPU implementer", "CPU variant", "CPU part", "CPU revision", "Features",
)  # fmt: skip


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
    if sys.platform == "darwin":
        return darwin_topology(darwin.read_sysctl())
    # Of the main thread: the one that asks may be pinned.
    return read_topology(Path("/"), frozenset(os.sched_getaffinity(os.getpid())))


def darwin_topology(values: Mapping[str, str]) -> Topology:
    """Return the topology of a Mac from its sysctl values: its performance cores alone.

    macOS lets nobody choose a thread's CPU, so the other cores are of no use to know.
    """
    n_cores = darwin.performance_cores(values)
    cpus = tuple(Cpu(i, i, (i,), CoreKind.PERFORMANCE) for i in range(n_cores))
    return Topology(cpus, quota_cpus=None)


def cpu_model(root: Path) -> str:
    """Return what the kernel calls the CPUs below root and what they can do; "" if it doesn't say.

    Source: Linux, arch/x86/kernel/cpu/proc.c and arch/arm64/kernel/cpuinfo.c.
    """
    if sys.platform == "darwin":
        return darwin.read_sysctl().get(darwin.CPU_MODEL, "")
    lines = read_text(root / "proc/cpuinfo").splitlines()
    # Each once: a chip with two kinds of cores has two of some lines.
    found = dict.fromkeys(line for line in lines if line.startswith(_CPU_MODEL_KEYS))
    return "\n".join(found)


def cache_bytes(root: Path) -> int:
    """Return the bytes of all last-level caches below root together; 0 if it doesn't say.

    Source: Linux, Documentation/ABI/testing/sysfs-devices-system-cpu, cache.
    """
    levels: dict[int, dict[str, int]] = {}
    for cache in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size = read_number(cache / "level"), read_text(cache / "size")
        kib = parse_number(size.removesuffix("K"))
        if level is not None and kib is not None:
            # CPUs that share a cache list the same CPUs.
            levels.setdefault(level, {})[read_text(cache / "shared_cpu_list")] = kib * 1024
    return sum(levels[max(levels)].values()) if levels else 0


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
        low, high = parse_number(first), parse_number(last if dash else first)
        if low is None or high is None or not low <= high < _MAX_CPUS:
            raise ValueError(f'CPU list has "{item}", expected numbers and ranges such as "0-3,8"')
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


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
    read = {cpu: read_number(folder / f"cpu{cpu}/cpu_capacity") for cpu in cpus}
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
            quota_us, _, period_us = read_text(level / "cpu.max").partition(" ")
        else:
            quota_us, period_us = (
                read_text(level / "cpu.cfs_quota_us"),
                read_text(level / "cpu.cfs_period_us"),
            )
        quota, period = parse_number(quota_us), parse_number(period_us)
        if quota and period:  # no quota is "max" in v2 and -1 in v1
            quotas.append(quota / period)
    return min(quotas, default=None)


def _read_cpu_list(path: Path) -> frozenset[int]:
    try:
        return parse_cpu_list(read_text(path))
    except ValueError:
        return frozenset()
