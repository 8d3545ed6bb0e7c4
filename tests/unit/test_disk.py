"""Which disk holds a file, what is measured of it, and speeds between what was measured."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.disk import DEPTHS, REQUEST_BYTES, covers, locate, measurable_sizes
from headrace.engine.errors import ModelFileError
from headrace.engine.profile import DiskPoint, DiskProfile

KIB, MIB = 1024, 1024**2
SPEEDS = st.floats(1e6, 1e10)
GRIDS = st.lists(SPEEDS, min_size=20, max_size=20).map(
    lambda speeds: disk(
        [DiskPoint(n, depth, speeds.pop()) for n in REQUEST_BYTES for depth in DEPTHS]
    )
)


def disk(points: list[DiskPoint]) -> DiskProfile:
    return DiskProfile("8:1", True, tuple(points), ())


def test_file_is_on_the_device_that_stat_tells(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(300))
    device = os.stat(path).st_dev
    assert locate(path) == (f"{os.major(device)}:{os.minor(device)}", 300)


def test_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no\.gguf: no such file or directory"):
        locate(tmp_path / "no.gguf")


@pytest.mark.parametrize(
    ("file_bytes", "sizes"),
    [
        (1, (64 * KIB,)),
        (4 * MIB, (64 * KIB,)),
        (16 * MIB, (64 * KIB, 256 * KIB)),
        (64 * MIB - 1, (64 * KIB, 256 * KIB)),
        (256 * MIB, REQUEST_BYTES),
    ],
)
def test_file_is_read_in_sizes_of_which_it_holds_many(
    file_bytes: int, sizes: tuple[int, ...]
) -> None:
    assert measurable_sizes(file_bytes) == sizes


def test_disk_measured_with_a_small_file_is_measured_again_for_a_larger_one() -> None:
    small = disk([DiskPoint(64 * KIB, 1, 1e9), DiskPoint(256 * KIB, 1, 1e9)])
    assert covers(small, 20 * MIB)
    assert covers(small, 4 * MIB)
    assert not covers(small, 64 * MIB)


@given(GRIDS)
def test_measured_points_are_kept(measured: DiskProfile) -> None:
    for point in measured.sequential:
        found = measured.bytes_per_s(point.request_bytes, point.depth, is_random=False)
        assert found == pytest.approx(point.bytes_per_s)


@given(GRIDS, st.integers(1, 64 * MIB), st.integers(1, 64))
def test_no_speed_is_beyond_those_measured(
    measured: DiskProfile, request_bytes: int, depth: int
) -> None:
    speeds = [point.bytes_per_s for point in measured.sequential]
    found = measured.bytes_per_s(request_bytes, depth, is_random=False)
    assert min(speeds) * (1 - 1e-9) <= found <= max(speeds) * (1 + 1e-9)


def test_speed_halfway_between_two_sizes_is_their_mean() -> None:
    measured = disk([DiskPoint(64 * KIB, 1, 1e9), DiskPoint(256 * KIB, 1, 3e9)])
    assert measured.bytes_per_s(128 * KIB, 1, is_random=False) == pytest.approx(2e9)


def test_speed_grows_with_the_depth_where_all_measured_do() -> None:
    measured = disk([DiskPoint(MIB, depth, depth * 1e8) for depth in DEPTHS])
    speeds = [measured.bytes_per_s(MIB, depth, is_random=False) for depth in range(1, 20)]
    assert all(low <= high for low, high in pairwise(speeds))
    assert speeds[-1] == 1.6e9


def test_order_of_reads_chooses_the_points() -> None:
    point = DiskPoint(MIB, 1, 1e9)
    measured = DiskProfile("8:1", True, (point,), (DiskPoint(MIB, 1, 1e8),))
    assert measured.bytes_per_s(MIB, 1, is_random=False) == 1e9
    assert measured.bytes_per_s(MIB, 1, is_random=True) == 1e8


def gaining(*shares: float) -> DiskProfile:
    """Return a disk that gives these shares of its speed to 1, 2, 4, 8 and 16 reads at once."""
    points = [
        DiskPoint(1 << 20, depth, share * 1e9) for depth, share in zip(DEPTHS, shares, strict=True)
    ]
    return DiskProfile("8:1", True, tuple(points), tuple(points))


@pytest.mark.parametrize(
    ("shares", "n_reads"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0), 2),
        ((0.96, 1.0, 0.99, 0.98, 0.9), 2),
        ((0.55, 0.8, 1.0, 1.0, 1.0), 4),
        ((0.2, 0.4, 0.7, 0.95, 1.0), 8),
        ((0.1, 0.2, 0.4, 0.8, 1.0), 16),
        # Four measurements of one disk, in GB/s.
        ((2.302, 2.492, 2.519, 2.669, 2.340), 4),
        ((2.213, 2.458, 2.321, 2.453, 2.407), 4),
        ((2.273, 2.235, 2.527, 2.597, 2.579), 4),
        ((2.187, 2.421, 2.401, 2.442, 2.515), 4),
    ],
)
def test_as_few_reads_are_in_flight_as_keep_a_disk_near_its_best(
    shares: tuple[float, ...], n_reads: int
) -> None:
    assert gaining(*shares).reads_in_flight(1 << 20) == n_reads
