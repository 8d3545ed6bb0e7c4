"""How fast the disk that holds a file gives its bytes: measured with reads of that file.

In: a path. Out: points of speed. Reads as streaming does, directly where the file system lets it,
and never writes. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from headrace.engine.disk import DEPTHS, locate, measurable_sizes
from headrace.engine.errors import ModelFileError
from headrace.engine.profile import DiskPoint, DiskProfile
from headrace.engine.weights import Reader

# native/readers.h, READERS_PIECE_BYTES: no thread reads more at once.
PIECE_BYTES = 1 << 20

_POINT_S = 0.04
# Disks have moods: the better of two times counts, unless the first round took long. While another
# process writes, one of 2.4 GB/s gave 0.5, and its round took 4 s instead of 1.6.
_N_ROUNDS = 2
_ROUND_S = 8.0
# While one batch is read another one waits, so that no thread has to.
_N_BATCHES = 2
# A batch holds some requests, as handing it over takes as long as a small one.
_LEAST_PIECES = 8
# Streaming reads whole blocks; native/source.h.
_BLOCK_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Reads:
    """A kind of reads: how many bytes each, how many pieces of them in flight, in which order."""

    request_bytes: int
    depth: int
    is_random: bool

    @property
    def n_bytes(self) -> int:
        """What is really read for a request: whole blocks."""
        return -(-self.request_bytes // _BLOCK_BYTES) * _BLOCK_BYTES

    @property
    def n_requests(self) -> int:
        """Requests of one batch: all threads have a piece of it."""
        piece_bytes = min(self.n_bytes, PIECE_BYTES)
        return -(-max(self.depth, _LEAST_PIECES) * piece_bytes // self.n_bytes)

    def offsets(self, file_bytes: int) -> Iterator[int]:
        """Yield where to read: in order from somewhere on, or anywhere."""
        n_places = max(1, file_bytes // self.n_bytes)
        if self.is_random:
            while True:
                yield random.randrange(n_places) * self.n_bytes
        for place in count(random.randrange(n_places)):
            yield place % n_places * self.n_bytes


def measure_disk(path: Path, progress: Progress = lambda done, total: None) -> DiskProfile:
    """Return how fast the file at path is read, by size and depth, in order and at random.

    progress hears of measurements done and measurements in all.

    Raises:
        ModelFileError: the file can't be read, or is empty.
    """
    with _reader(path) as reader:
        is_direct, sizes = reader.is_direct, measurable_sizes(reader.size)
    grid = [(n, depth) for depth in DEPTHS for n in sizes]
    kinds = [Reads(n, depth, is_random) for n, depth in grid for is_random in (False, True)]
    points = measure_reads(path, kinds, progress)
    return DiskProfile(locate(path)[0], is_direct, tuple(points[::2]), tuple(points[1::2]))


def measure_reads(
    path: Path, kinds: Sequence[Reads], progress: Progress = lambda done, total: None
) -> list[DiskPoint]:
    """Return how fast each of kinds reads the file at path; errors are those of measure_disk."""
    memory = _memory(max(_N_BATCHES * r.n_requests * r.n_bytes for r in kinds))
    memory[:] = bytes(len(memory))  # its pages are there before any clock starts
    best, total_s = [0.0] * len(kinds), 0.0
    for done in range(_N_ROUNDS):
        if total_s > _ROUND_S:
            break
        for i, reads in enumerate(kinds):
            with _reader(path, reads.depth) as reader:
                n, duration = _read_for_a_while(reader, reads, memory)
            if not n:
                raise ModelFileError(f"{path}: is empty, expected a model to read")
            best[i] = max(best[i], n / duration)
            total_s += duration
            progress(done * len(kinds) + i + 1, _N_ROUNDS * len(kinds))
    return [
        DiskPoint(reads.request_bytes, reads.depth, speed)
        for reads, speed in zip(kinds, best, strict=True)
    ]


def _memory(n_bytes: int) -> memoryview:
    """Return memory like that which streaming reads into.

    On a disk of 2.6 GB/s the same reads reached 1.1 into memory that is shared, on small pages.
    """
    mapping = mmap.mmap(-1, n_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)[:n_bytes]


def _read_for_a_while(reader: Reader, reads: Reads, memory: memoryview) -> tuple[int, float]:
    """Read into memory, batch after batch; return the bytes read and the seconds it took."""
    offsets, lock = reads.offsets(reader.size), threading.Lock()

    def read(batch: int) -> int:
        places = range(batch * reads.n_requests, (batch + 1) * reads.n_requests)
        buffers = [memory[i * reads.n_bytes : (i + 1) * reads.n_bytes] for i in places]
        n_read = 0
        while True:
            with lock:
                starts = list(islice(offsets, reads.n_requests))
            n_read += sum(reader.read_into(list(zip(starts, buffers, strict=True))))
            if time.perf_counter() >= until:
                return n_read

    with ThreadPoolExecutor(_N_BATCHES) as pool:
        start = time.perf_counter()
        until = start + _POINT_S
        n_read = sum(pool.map(read, range(_N_BATCHES)))
        return n_read, time.perf_counter() - start


@contextmanager
def _reader(path: Path, n_threads: int = 1) -> Iterator[Reader]:
    try:
        with Reader(path, n_threads=n_threads) as reader:
            yield reader
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {str(error.strerror).lower()}") from error
