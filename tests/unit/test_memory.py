"""Memory and its limits, read from trees in the form that such machines show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headrace.engine.errors import EngineError
from headrace.engine.memory import read_memory, spare_bytes, this_memory

MIB, GIB = 1024**2, 1024**3
MEM_AVAILABLE = 16384000 * 1024  # in every tree that has /proc/meminfo
MEMINFO = "MemTotal: 32768000 kB\nMemAvailable: {} kB\n"

Unpack = Callable[..., Path]


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        ("container_v1", 4096 * MIB - (1536 * MIB - 256 * MIB)),
        ("slice_v1_nested", 8 * GIB - (6 * GIB - 1 * GIB)),  # the limit is the parent's
        ("container_v2", 3072 * MIB - (1024 * MIB - 384 * MIB)),
        ("pod_v2_nested", 6 * GIB - (5 * GIB - 1 * GIB)),  # the leaf says max
        ("vm_without_topology", MEM_AVAILABLE),
        ("garbage", MEM_AVAILABLE),
    ],
)
def test_available_memory_is_the_least_that_machine_and_cgroups_leave(
    unpack: Unpack, name: str, n_bytes: int
) -> None:
    assert read_memory(unpack(name)).available_bytes == n_bytes


def test_machine_with_less_than_the_cgroup_allows_decides(unpack: Unpack) -> None:
    root = unpack("container_v2", {"proc/meminfo": MEMINFO.format(1024)})
    assert read_memory(root).available_bytes == MIB


def test_memory_high_is_a_limit_too(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/memory.high": f"{2 * GIB}\n"})
    assert read_memory(root).available_bytes == 2 * GIB - (1024 * MIB - 384 * MIB)


def test_cgroup_over_its_limit_leaves_nothing(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/memory.current": f"{9 * GIB}\n"})
    memory = read_memory(root)
    assert memory.available_bytes == 0
    assert memory.missing_bytes == 9 * GIB - 384 * MIB - 3072 * MIB


def test_inactive_cache_beyond_the_usage_adds_nothing_to_the_limit(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/memory.stat": f"inactive_file {9 * GIB}\n"})
    assert read_memory(root).available_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("meminfo", "missing"),
    [
        ("", "MemTotal"),
        ("MemTotal: 5 kB\n", "MemAvailable"),
        ("MemTotal: 5 kB\nMemAvailable: much kB\n", "MemAvailable"),
    ],
)
def test_machine_that_does_not_tell_its_memory_is_an_error(
    unpack: Unpack, meminfo: str, missing: str
) -> None:
    root = unpack("container_v2", {"proc/meminfo": meminfo})
    with pytest.raises(EngineError, match=f"meminfo has no {missing}, expected one as in Linux"):
        read_memory(root)


@pytest.mark.parametrize(
    ("name", "limit_bytes"),
    [
        ("container_v1", 4096 * MIB),
        ("slice_v1_nested", 8 * GIB),
        ("container_v2", 3072 * MIB),
        ("pod_v2_nested", 6 * GIB),
        ("vm_without_topology", None),
        ("garbage", None),
    ],
)
def test_limit_is_the_tightest_up_the_cgroup_tree(
    unpack: Unpack, name: str, limit_bytes: int | None
) -> None:
    memory = read_memory(unpack(name))
    assert (memory.limit_bytes, memory.physical_bytes) == (limit_bytes, 32768000 * 1024)


def test_limit_that_the_machine_can_t_reach_is_none(unpack: Unpack) -> None:
    # How version 1 spells "none".
    limit = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    memory = read_memory(unpack("container_v1", limit))
    assert memory.limit_bytes is None
    assert memory.available_bytes == MEM_AVAILABLE


def test_swap_is_read_and_may_be_missing(unpack: Unpack) -> None:
    swap = "SwapTotal:  2048 kB\nSwapFree:  1024 kB\n"
    memory = read_memory(unpack("", {"proc/meminfo": MEMINFO.format(1024) + swap}))
    assert (memory.swap_total_bytes, memory.swap_free_bytes) == (2 * MIB, MIB)
    memory = read_memory(unpack("", {"proc/meminfo": MEMINFO.format(1024)}))
    assert (memory.swap_total_bytes, memory.swap_free_bytes) == (0, 0)


def test_this_machine_has_what_it_says() -> None:
    memory = this_memory()
    assert 0 < memory.available_bytes <= memory.physical_bytes
    assert memory.physical_bytes == psutil.virtual_memory().total


def test_little_is_left_to_others_on_a_small_machine_and_512_mib_on_a_large_one() -> None:
    spare_mib = [spare_bytes(n * MIB) // MIB for n in (100, 192, 1445, 2048, 4096, 65536)]
    assert spare_mib == [0, 0, 1445 - 192, 2048 - 256, 4096 - 512, 65536 - 512]


def test_more_memory_never_leaves_less_for_a_model() -> None:
    spare = [spare_bytes(n * MIB) for n in range(0, 8192, 7)]
    assert spare == sorted(spare)
