"""Pressure on memory, read from trees in the form that machines show, and from this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.engine.pressure import Gauge, Reading

Unpack = Callable[..., Path]
MIB = 1 << 20
LEAF = "sys/fs/cgroup/kubepods.slice/pod7.slice/app.scope"


def pressure(some_us: int, full_us: int = 0) -> str:
    """Return the file as Linux 6.18 writes it."""
    return (
        f"some avg10=1.57 avg60=0.73 avg300=0.21 total={some_us}\n"
        f"full avg10=1.20 avg60=0.55 avg300=0.16 total={full_us}\n"
    )


def read(root: Path) -> Reading:
    gauge = Gauge(root)
    reading = gauge.read()
    gauge.close()
    return reading


def test_the_stall_is_that_of_our_own_cgroup(unpack: Unpack) -> None:
    files = {
        f"{LEAF}/memory.pressure": pressure(2_500_000, 9_000_000),
        "sys/fs/cgroup/kubepods.slice/pod7.slice/memory.pressure": pressure(7_000_000),
        "proc/pressure/memory": pressure(301_389_179, 279_889_407),
    }
    assert read(unpack("pod_v2_nested", files)).stall_s == 2.5


def test_a_cgroup_that_tells_no_stall_has_the_machines(unpack: Unpack) -> None:
    machine = {"proc/pressure/memory": pressure(301_389_179)}
    assert read(unpack("pod_v2_nested", machine)).stall_s == 301.389179


def test_a_kernel_without_stall_information_never_tells_any(unpack: Unpack) -> None:
    root = unpack("container_v2")
    (root / "sys/fs/cgroup/memory.pressure").write_text("")  # psi=0
    assert read(root).stall_s == 0


def test_in_version_1_the_stall_of_others_is_not_ours(unpack: Unpack) -> None:
    machine = {"proc/pressure/memory": pressure(301_389_179)}
    assert read(unpack("container_v1", machine)).stall_s == 0


def test_what_is_in_use_beyond_a_limit_is_free_memory_below_zero(unpack: Unpack) -> None:
    root = unpack("container_v2", {"sys/fs/cgroup/memory.high": f"{512 * MIB}\n"})
    assert read(root).free_bytes == (512 - (1024 - 384)) * MIB
