"""CPUs, read from trees in the form that such machines show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.engine.darwin import CPU_MODEL, parse_sysctl
from headrace.engine.hardware import (
    CoreKind,
    Topology,
    cache_bytes,
    cpu_model,
    darwin_topology,
    parse_cpu_list,
    read_topology,
)

TREES = Path(__file__).parent / "topologies"
EVERY_TREE = sorted(path.stem for path in TREES.glob("*.json"))
MIB = 1024**2

Unpack = Callable[..., Path]


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


@pytest.mark.parametrize("name", EVERY_TREE)
def test_every_topology_has_each_allowed_cpu_once_and_a_thread(unpack: Unpack, name: str) -> None:
    found = topology(unpack(name), *range(24))
    assert [cpu.index for cpu in found.cpus] == list(range(24))
    assert 1 <= found.default_threads <= len(found.physical_performance_cpus)
    assert not set(found.physical_performance_cpus) & set(found.efficiency_cpus)


def test_caches_of_the_last_level_are_counted_once_each(unpack: Unpack) -> None:
    folder = "sys/devices/system/cpu/cpu{}/cache/index{}/{}"
    tree = {}
    for cpu, shared_by in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, level, size, cpus in ((0, 1, "32K", cpu), (3, 3, "32768K", shared_by)):
            tree[folder.format(cpu, index, "level")] = f"{level}\n"
            tree[folder.format(cpu, index, "size")] = f"{size}\n"
            tree[folder.format(cpu, index, "shared_cpu_list")] = f"{cpus}\n"
    assert cache_bytes(unpack("", tree)) == 2 * 32 * MIB


def test_machine_that_tells_of_no_cache_has_none(unpack: Unpack) -> None:
    assert cache_bytes(unpack("vm_without_topology")) == 0


def test_cpu_model_is_what_kernels_depend_on_and_no_frequency(unpack: Unpack) -> None:
    text = "processor\t: {}\nmodel name\t: AMD EPYC\ncpu MHz\t\t: {}\nflags\t\t: fma avx2\n\n"
    path = "proc/cpuinfo"
    first = cpu_model(unpack("", {path: text.format(0, 2600) + text.format(1, 2900)}))
    assert first == "model name\t: AMD EPYC\nflags\t\t: fma avx2"
    assert cpu_model(unpack("", {path: text.format(0, 3100) + text.format(1, 1500)})) == first


def test_cpu_model_of_two_kinds_of_cores_has_both(unpack: Unpack) -> None:
    text = "CPU implementer\t: 0x41\nCPU part\t: {}\n"
    found = cpu_model(unpack("", {"proc/cpuinfo": text.format("0xd05") + text.format("0xd41")}))
    assert found == "CPU implementer\t: 0x41\nCPU part\t: 0xd05\nCPU part\t: 0xd41"


@pytest.mark.parametrize(
    ("printed", "n_cores"),
    [
        # An M1 Pro, a Mac with an Intel CPU, and one that tells nothing.
        ("hw.perflevel0.physicalcpu: 8\nhw.physicalcpu: 10\n", 8),
        ("hw.physicalcpu: 6\nmachdep.cpu.brand_string: Intel(R) Core(TM) i7-9750H\n", 6),
        ("", 1),
        ("hw.physicalcpu: many\n", 1),
    ],
)
def test_a_mac_computes_on_its_performance_cores(printed: str, n_cores: int) -> None:
    found = darwin_topology(parse_sysctl(printed))
    assert found.physical_performance_cpus == tuple(range(n_cores))
    assert (found.default_threads, found.efficiency_cpus, found.quota_cpus) == (n_cores, (), None)


def test_values_of_sysctl_may_hold_colons() -> None:
    printed = "machdep.cpu.brand_string: Apple M1 Pro: rev 2\n"
    assert parse_sysctl(printed) == {CPU_MODEL: "Apple M1 Pro: rev 2"}
