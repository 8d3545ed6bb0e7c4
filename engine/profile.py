"""What was measured of this machine: its memory, its kernels, its GPUs and its disks.

In: measured points. Out: a Profile, which forecasts ask for speeds. Knows neither how it was
measured nor any model.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise
from math import log2

import msgspec

CPU = "CPU"
"""The backend of weights that lie as a file has them."""
CPU_REPACK = "CPU_REPACK"
"""The backend of weights that llama.cpp keeps in another order, for kernels that are faster."""

# Numbers of reads in flight. Two are enough for a disk that gains nothing by more than one. Else it
# is four unless more clearly bring more: points scatter by 5 %, and the fewest within that of the
# best were 8, 2, 4 and 2 in four measurements of one disk.
_DEPTHS, _ALONE, _NEAR_BEST = (2, 4, 8, 16), 0.95, 0.9


class DiskPoint(msgspec.Struct, frozen=True):
    """The speed of reads of one size, with so many in flight."""

    request_bytes: int
    depth: int
    bytes_per_s: float


class DiskProfile(msgspec.Struct, frozen=True):
    """What a disk gives, by size and depth; device is st_dev as "major:minor"."""

    device: str
    is_direct: bool
    sequential: tuple[DiskPoint, ...]
    random: tuple[DiskPoint, ...]

    def bytes_per_s(self, request_bytes: int, depth: int, *, is_random: bool) -> float:
        """Return the speed of such reads, between and never beyond what was measured."""
        points = sorted(
            self.random if is_random else self.sequential,
            key=lambda point: (point.request_bytes, point.depth),
        )
        by_size = [
            (size, _interpolated(((p.depth, p.bytes_per_s) for p in group), depth))
            for size, group in groupby(points, key=lambda point: point.request_bytes)
        ]
        return _interpolated(by_size, request_bytes)

    def reads_in_flight(self, request_bytes: int) -> int:
        """Return the fewest reads of a size at once that keep the disk near its best speed."""

        def speed(depth: int) -> float:
            orders = (False, True)
            return sum(self.bytes_per_s(request_bytes, depth, is_random=r) for r in orders) / 2

        best = max(speed(point.depth) for point in self.sequential)
        if speed(1) >= _ALONE * best:
            return _DEPTHS[0]
        return next((n for n in _DEPTHS[1:] if speed(n) >= _NEAR_BEST * best), _DEPTHS[-1])


class KernelSpeed(msgspec.Struct, frozen=True):
    """How fast weights of one type are used by one backend."""

    type: str
    """ggml's name, such as "Q4_0"."""
    decode_bytes_per_s: float
    """Weight bytes that one token's matrix products consume per second, all threads together."""
    prefill_flops: float
    """2*m*n*k per second of MUL_MAT at 512 tokens."""
    expert_prefill_flops: float
    """The same of MUL_MAT_ID with 128 experts, 8 of them used, at 512 tokens."""
    backend: str = CPU
    """Whose kernel it is: CPU, CPU_REPACK, or a GPU by its name."""
    expert_decode_bytes_per_s: float = 0.0
    """As decode_bytes_per_s, of MUL_MAT_ID with 8 of 128 experts; 0: not known."""
    load_bytes_per_s: float = 0.0
    """At which weights come from memory to where they stay, by one thread; 0: not known."""


class GpuDevice(msgspec.Struct, frozen=True):
    """A GPU as ggml lists it."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    memory_bytes_per_s: float = 0.0
    """At which one token's products with F16 weights read its memory; 0: not known."""
    is_integrated: bool = False
    """Whether its memory is the machine's: then no plan gains by it."""


class Profile(msgspec.Struct, frozen=True):
    """All that was measured; key tells whether it is still this machine's."""

    key: str
    n_threads: int
    memory_bytes_per_s: float
    kernels: tuple[KernelSpeed, ...]
    gpus: tuple[GpuDevice, ...]
    disks: tuple[DiskProfile, ...]
    attention_flops: float = 0.0
    """4*d*n*m per second of the CPU's attention, of n tokens to m with heads of d; 0: not known."""

    def kernel(self, type_name: str, backend: str = CPU) -> KernelSpeed | None:
        """Return the speed of a tensor type, or None if it was not measured.

        What was not measured beside a type that was, that backend can't use.
        """
        wanted = type_name, backend
        return next((k for k in self.kernels if (k.type, k.backend) == wanted), None)

    def gpu(self, name: str) -> GpuDevice | None:
        """Return the GPU of that name, or None if there is none."""
        return next((gpu for gpu in self.gpus if gpu.name == name), None)

    def disk(self, device: str) -> DiskProfile | None:
        """Return the disk that has files of that st_dev, or None if it was not measured."""
        return next((disk for disk in self.disks if disk.device == device), None)


def _interpolated(points: Iterable[tuple[int, float]], x: int) -> float:
    """Return y at x of points in the order of x: straight lines over log2(x), level outside."""
    known = list(points)
    for (x0, y0), (x1, y1) in pairwise(known):
        if x0 <= x < x1:
            return y0 + (y1 - y0) * (log2(x) - log2(x0)) / (log2(x1) - log2(x0))
    return known[0][1] if x < known[0][0] else known[-1][1]
