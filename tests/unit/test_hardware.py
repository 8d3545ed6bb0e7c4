"""CPU topology and available memory, read from trees in the form that such machines show."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headrace.engine.errors import EngineError
from headrace.engine.hardware import (
    CoreKind,
    Topology,
    available_memory_bytes,
    parse_cpu_list,
    read_topology,
)

TREES = Path(__file__).parent / "topologies"
EVERY_TREE = sorted(path.stem for path in TREES.glob("*.json"))
MIB, GIB = 1024**2, 1024**3
MEM_AVAILABLE = 16384000 * 1024  # in every tree that has /proc/meminfo

Unpack = Callable[..., Path]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """Return a function that makes the tree of that name, with changes, and returns its root."""

    def make(name: str = "", changes: Mapping[str, str] | None = None) -> Path:
        tree: dict[str, str] = json.loads((TREES / f"{name}.json").read_text()) if name else {}
        for path, content in {**tree, **(changes or {})}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content)
        return tmp_path

    return make


def topology(root: Path, *cpus: int) -> Topology:
    return read_topology(root, frozenset(cpus))


def test_hybrid_laptop_computes_on_one_thread_of_each_p_core(unpack: Unpack) -> None:
    found = topology(unpack("hybrid_8p_smt_8e"), *range(24))
    assert found.physical_performance_cpus == (0, 2, 4, 6, 8, 10, 12, 14)
    assert found.efficiency_cpus == (16, 17, 18, 19, 20, 21, 22, 23)
    assert found.default_threads == 8
    assert found.quota_cpus is None


def test_smt_threads_of_a_core_are_siblings_with_one_core_id(unpack: Unpack) -> None:
    cpus = topology(unpack("hybrid_8p_smt_8e"), *range(24)).cpus
    assert [(cpu.core, cpu.siblings) for cpu in cpus[2:4]] == [(2, (2, 3)), (2, (2, 3))]
    assert (cpus[16].core, cpus[16].siblings) == (16, (16,))
    assert [cpu.index for cpu in cpus] == list(range(24))


def test_big_cores_of_4_and_4_are_performance(unpack: Unpack) -> None:
    found = topology(unpack("arm_4_little_4_big"), *range(8))
    assert found.physical_performance_cpus == (4, 5, 6, 7)
    assert found.efficiency_cpus == (0, 1, 2, 3)
    assert found.default_threads == 4


def test_middle_cores_near_the_prime_core_are_performance(unpack: Unpack) -> None:
    found = topology(unpack("arm_4_little_3_middle_1_prime"), *range(8))
    assert found.physical_performance_cpus == (4, 5, 6, 7)
    assert found.efficiency_cpus == (0, 1, 2, 3)


@pytest.mark.parametrize(("capacity", "kind"), [("768", "performance"), ("767", "efficiency")])
def test_core_is_performance_from_three_quarters_of_the_fastest(
    unpack: Unpack, capacity: str, kind: str
) -> None:
    changes = {"sys/devices/system/cpu/cpu4/cpu_capacity": capacity}
    found = topology(unpack("arm_4_little_3_middle_1_prime", changes), *range(8))
    assert found.cpus[4].kind is CoreKind(kind)


def test_core_without_capacity_is_not_called_slow(unpack: Unpack) -> None:
    changes = {"sys/devices/system/cpu/cpu1/cpu_capacity": "?"}
    found = topology(unpack("arm_4_little_4_big", changes), *range(8))
    assert found.efficiency_cpus == (0, 2, 3)


def test_cores_of_two_sockets_are_told_apart(unpack: Unpack) -> None:
    found = topology(unpack("server_2_sockets_smt"), *range(16))
    assert found.physical_performance_cpus == tuple(range(8))
    assert found.efficiency_cpus == ()
    assert found.default_threads == 8


def test_affinity_mask_leaves_only_its_cpus(unpack: Unpack) -> None:
    found = topology(unpack("hybrid_8p_smt_8e"), 3, 4, 5, 17, 18)
    assert [cpu.index for cpu in found.cpus] == [3, 4, 5, 17, 18]
    assert found.physical_performance_cpus == (3, 4)  # the one thread left of core 2, and core 4
    assert found.efficiency_cpus == (17, 18)
    assert found.default_threads == 2


@pytest.mark.parametrize(
    ("name", "mask"), [("hybrid_8p_smt_8e", (16, 17, 20)), ("arm_4_little_4_big", (0, 1, 3))]
)
def test_slow_cores_compute_where_no_other_is_allowed(
    unpack: Unpack, name: str, mask: tuple[int, ...]
) -> None:
    found = topology(unpack(name), *mask)
    assert found.physical_performance_cpus == mask
    assert found.efficiency_cpus == ()
    assert found.default_threads == 3


@pytest.mark.parametrize(
    ("name", "quota_cpus", "threads"),
    [
        ("container_v1", 2.5, 2),
        ("slice_v1_nested", 3.0, 3),
        ("container_v2", 1.5, 1),
        ("pod_v2_nested", 4.0, 4),
        ("vm_without_topology", None, 8),
    ],
)
def test_tightest_quota_up_the_cgroup_tree_bounds_the_threads(
    unpack: Unpack, name: str, quota_cpus: float | None, threads: int
) -> None:
    found = topology(unpack(name), *range(8))
    assert (found.quota_cpus, found.default_threads) == (quota_cpus, threads)


def test_quota_below_one_cpu_still_leaves_a_thread(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert topology(root, *range(8)).default_threads == 1


@pytest.mark.parametrize("quota", ["100000", "100000 0", "0 100000", "-1 100000"])
def test_quota_without_sense_is_no_quota(unpack: Unpack, quota: str) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/cpu.max": quota})
    assert topology(root, 0, 1).quota_cpus is None


def test_quota_above_the_cores_adds_no_thread(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/cpu.max": "6400000 100000\n"})
    assert topology(root, 0, 1).default_threads == 2


@pytest.mark.parametrize("name", ["vm_without_topology", "garbage", ""])
def test_machine_that_tells_nothing_sensible_has_a_core_per_cpu(unpack: Unpack, name: str) -> None:
    found = topology(unpack(name), 0, 1, 2, 3)
    assert found.physical_performance_cpus == (0, 1, 2, 3)
    assert found.efficiency_cpus == ()
    assert [cpu.siblings for cpu in found.cpus] == [(0,), (1,), (2,), (3,)]
    assert (found.quota_cpus, found.default_threads) == (None, 4)


@pytest.mark.parametrize(
    ("cgroup", "path"),
    [
        ("0::/a/b\n", "a"),  # v2 alone
        ("1:name=systemd:/\n0::/a/b\n", "unified/a/b"),  # v2 beside v1
    ],
)
def test_quota_of_v2_is_found_wherever_v2_is_mounted(
    unpack: Unpack, cgroup: str, path: str
) -> None:
    quota = {f"sys/fs/cgroup/{path}/cpu.max": "200000 100000\n"}
    assert topology(unpack("", {"proc/self/cgroup": cgroup, **quota}), 0).quota_cpus == 2.0


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_quota_of_v1_is_found_below_either_name_of_its_mount(unpack: Unpack, folder: str) -> None:
    changes = {
        "proc/self/cgroup": "0::/\n2:cpu,cpuacct:/a\n",
        f"sys/fs/cgroup/{folder}/a/cpu.cfs_quota_us": "200000\n",
        f"sys/fs/cgroup/{folder}/a/cpu.cfs_period_us": "100000\n",
    }
    assert topology(unpack("", changes), 0).quota_cpus == 2.0


def test_cgroup_outside_the_namespace_is_not_looked_for(unpack: Unpack) -> None:
    changes = {"proc/self/cgroup": "0::/../b\n", "sys/fs/b/cpu.max": "100000 100000\n"}
    assert topology(unpack("container_v2", changes), 0, 1).quota_cpus == 1.5


def test_file_that_is_not_text_counts_as_missing(unpack: Unpack) -> None:
    root = unpack("container_v2")
    (root / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff\x00\xb2 \xc2\xb2")
    assert topology(root, 0).quota_cpus is None


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", set()),
        ("\n", set()),
        ("0\n", {0}),
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5-5", {5}),
        ("8191", {8191}),
    ],
)
def test_cpu_list_is_read_as_the_kernel_prints_it(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    "item", ["a", "-1", "3-", "3-1", "1-2-3", "8192", "0-99999999999", "\u00b2", "9" * 5000, "0x1"]
)
def test_cpu_list_with_anything_else_is_refused(item: str) -> None:
    with pytest.raises(ValueError, match="expected numbers and ranges") as caught:
        parse_cpu_list(f"0,{item}")
    assert f'CPU list has "{item}"' in str(caught.value)


@pytest.mark.parametrize("text", ["0,", ",", "0,,1"])
def test_cpu_list_with_an_empty_item_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match='CPU list has ""'):
        parse_cpu_list(text)


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
    assert available_memory_bytes(unpack(name)) == n_bytes


def test_machine_with_less_than_the_cgroup_allows_decides(unpack: Unpack) -> None:
    root = unpack("container_v2", {"proc/meminfo": "MemAvailable:   1024 kB\n"})
    assert available_memory_bytes(root) == MIB


def test_memory_high_is_a_limit_too(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/memory.high": f"{2 * GIB}\n"})
    assert available_memory_bytes(root) == 2 * GIB - (1024 * MIB - 384 * MIB)


def test_cgroup_over_its_limit_leaves_nothing(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/memory.current": f"{9 * GIB}\n"})
    assert available_memory_bytes(root) == 0


def test_inactive_cache_beyond_the_usage_adds_nothing_to_the_limit(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/memory.stat": f"inactive_file {9 * GIB}\n"})
    assert available_memory_bytes(root) == 3 * GIB


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 5 kB\n", "MemAvailable: much kB\n"])
def test_machine_without_memavailable_is_an_error(unpack: Unpack, meminfo: str) -> None:
    root = unpack("container_v2", {"proc/meminfo": meminfo})
    with pytest.raises(EngineError, match="meminfo has no MemAvailable, expected one as in Linux"):
        available_memory_bytes(root)


@pytest.mark.parametrize("name", EVERY_TREE)
def test_every_topology_has_each_allowed_cpu_once_and_a_thread(unpack: Unpack, name: str) -> None:
    found = topology(unpack(name), *range(24))
    assert [cpu.index for cpu in found.cpus] == list(range(24))
    assert 1 <= found.default_threads <= len(found.physical_performance_cpus)
    assert not set(found.physical_performance_cpus) & set(found.efficiency_cpus)
