"""The compiled module against plain reads of the same files, its errors, and what it leaves."""

from __future__ import annotations

import errno
import gc
import importlib.util
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from child import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.native import Reader, _streamer

MIB = 1 << 20
SIZE = 3 * MIB + 1
CONTENT = random.Random(0).randbytes(SIZE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streamer") / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "buffered"])
def reader(request: pytest.FixtureRequest, path: Path) -> Iterator[Reader]:
    with Reader(path, n_threads=4, direct=request.param) as reader:
        yield reader


def borders(block_bytes: int) -> list[int]:
    """Return offsets at, before and after what the reader cuts its reads by."""
    middles = [0, block_bytes, 4096, MIB, 2 * MIB, SIZE - block_bytes, SIZE, 2 * SIZE]
    return sorted({max(0, middle + d) for middle in middles for d in (-1, 0, 1)})


def n_open() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


# What is read


def test_bytes_are_those_of_a_plain_read_at_every_border(reader: Reader) -> None:
    for offset in borders(reader.block_bytes):
        for n_bytes in (0, 1, reader.block_bytes - 1, reader.block_bytes, 5001, SIZE):
            expected = CONTENT[offset : offset + n_bytes]
            assert reader.read(offset, n_bytes) == expected, (offset, n_bytes)


def test_misaligned_buffers_get_the_same_bytes_and_nothing_around_them(reader: Reader) -> None:
    memory = memoryview(mmap.mmap(-1, SIZE + 8192))
    for skew in (0, 1, 32, reader.block_bytes - 1, 4097):
        for offset, n_bytes in [(0, SIZE), (4096, 4096), (4097, MIB), (33, 10_000)]:
            memory[:] = b"\xa5" * len(memory)
            assert reader.read_into([(offset, memory[skew : skew + n_bytes])]) == [
                min(n_bytes, SIZE - offset)
            ]
            assert memory[skew : skew + n_bytes] == CONTENT[offset : offset + n_bytes]
            assert memory[:skew].tobytes().count(0xA5) == skew
            assert memory[skew + n_bytes :].tobytes().count(0xA5) == len(memory) - skew - n_bytes


@settings(max_examples=60, deadline=None)
@given(ranges=st.lists(st.tuples(st.integers(0, SIZE + 9000), st.integers(0, 9000)), max_size=30))
def test_many_requests_at_once_equal_one_pread_each(
    reader: Reader, path: Path, ranges: list[tuple[int, int]]
) -> None:
    buffers = [bytearray(n_bytes) for _, n_bytes in ranges]
    requests = [(offset, buffer) for (offset, _), buffer in zip(ranges, buffers, strict=True)]
    results = reader.read_into(requests)
    fd = os.open(path, os.O_RDONLY)
    expected = [os.pread(fd, n_bytes, offset) for offset, n_bytes in ranges]
    os.close(fd)
    found = [bytes(buffer[:n]) for buffer, n in zip(buffers, results, strict=True)]
    assert found == expected


def test_python_threads_may_read_at_once(reader: Reader) -> None:
    def reads_right(seed: int) -> bool:
        rng = random.Random(seed)
        offsets = [rng.randrange(SIZE) for _ in range(50)]
        return all(reader.read(i, 20_000) == CONTENT[i : i + 20_000] for i in offsets)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(reads_right, range(16)))


@pytest.mark.parametrize("direct", [True, False])
def test_file_truncated_while_open_gives_short_reads(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with Reader(path, direct=direct) as reader:
        os.truncate(path, MIB + 77)
        buffers = [bytearray(SIZE), bytearray(100), bytearray(100)]
        requests = list(zip([0, MIB, 2 * MIB], buffers, strict=True))
        assert reader.read_into(requests) == [MIB + 77, 77, 0]
        assert buffers[0][: MIB + 77] == CONTENT[: MIB + 77]
        assert reader.size == SIZE


def test_tmpfs_gives_the_same_bytes() -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm to write to")
    with tempfile.NamedTemporaryFile(dir=shm) as file:
        file.write(CONTENT)
        file.flush()
        with Reader(file.name) as reader:
            assert reader.read(0, SIZE + 1) == CONTENT
            assert reader.read(4097, 9999) == CONTENT[4097 : 4097 + 9999]


def test_file_that_refuses_direct_reads_is_read_buffered_and_says_so() -> None:
    with Reader("/proc/version") as reader:
        assert not reader.is_direct
        assert reader.read(0, 10_000) == Path("/proc/version").read_bytes()


def test_empty_file_has_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with Reader(tmp_path / "empty") as reader:
        assert reader.size == 0
        assert reader.read(0, 10) == b""
        assert reader.read_into([]) == []


def test_stats_count_bytes_and_pieces(path: Path) -> None:
    with Reader(path) as reader:
        assert reader.stats() == (0, 0, 0)
        reader.read_into([(0, bytearray(SIZE)), (SIZE - 1, bytearray(10))])
        stats = reader.stats()
        assert (stats.bytes_read, stats.n_reads) == (SIZE + 1, 5)
        assert stats.busy_ns > 0


# What is refused


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("missing", errno.ENOENT),
        ("file/inside", errno.ENOTDIR),
        ("n" * 300, errno.ENAMETOOLONG),
        (".", errno.EISDIR),
        ("/dev/null", errno.EINVAL),
    ],
)
def test_failed_open_names_errno_and_file(path: Path, name: str, code: int) -> None:
    before = n_open()
    with pytest.raises(OSError, match="Errno") as caught:
        Reader(path.parent / name)
    assert caught.value.errno == code
    assert caught.value.filename == str(path.parent / name)
    assert n_open() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0)
    with pytest.raises(PermissionError):
        Reader(path)


@pytest.mark.parametrize("n_threads", [-1, 0, 65])
def test_number_of_threads_out_of_range_is_refused(path: Path, n_threads: int) -> None:
    with pytest.raises(ValueError, match=f"n_threads is {n_threads}, expected 1 to 64"):
        Reader(path, n_threads)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ((0, b"read-only"), TypeError),
        ((0, memoryview(bytearray(8))[::2]), (TypeError, BufferError)),
        ((0, 1), TypeError),
        (("0", bytearray(1)), TypeError),
        ([0, bytearray(1)], TypeError),
        ((0,), TypeError),
        ((-1, bytearray(1)), ValueError),
        ((1 << 64, bytearray(1)), OverflowError),
        (((1 << 63) - 1, bytearray(1)), OSError),
    ],
)
def test_bad_request_is_refused_and_no_buffer_stays_held(
    reader: Reader, request_: Any, error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    good = bytearray(1)
    with pytest.raises(error):
        reader.read_into([(0, good), request_])
    good.append(0)  # BufferError if it were held
    if isinstance(request_[-1], bytearray):
        request_[-1].append(0)
    assert reader.read(0, 1) == CONTENT[:1]


def test_bad_range_of_read_is_refused(reader: Reader) -> None:
    with pytest.raises(ValueError, match="offset is -1, expected 0 or more"):
        reader.read(-1, 1)
    with pytest.raises(ValueError, match="n_bytes is -1, expected 0 or more"):
        reader.read(0, -1)
    with pytest.raises(MemoryError):
        reader.read(0, sys.maxsize - 1000)


@pytest.mark.parametrize(
    "use",
    [
        lambda reader: reader.read(0, 1),
        lambda reader: reader.read_into([]),
        lambda reader: reader.stats(),
        lambda reader: reader.__enter__(),
    ],
)
def test_closed_reader_refuses_every_use(path: Path, use: Callable[[Reader], object]) -> None:
    reader = Reader(path)
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="reader is closed"):
        use(reader)


def test_close_during_a_read_is_refused_and_the_read_completes(path: Path) -> None:
    reader = Reader(path, n_threads=1)
    buffer = bytearray(256 << 10)
    n_requests = 3000  # long enough to be met while it runs
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(reader.read_into, [(1, buffer)] * n_requests)
        while reader.stats().n_reads == 0:
            time.sleep(0.001)
        with pytest.raises(OSError, match="busy") as caught:
            reader.close()
        with pytest.raises(BufferError):
            buffer.append(0)
        assert not results.done()
        assert results.result() == [len(buffer)] * n_requests
    assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(path))
    assert buffer == CONTENT[1 : 1 + len(buffer)]
    reader.close()


def test_reader_closed_by_its_own_request_reads_nothing(path: Path) -> None:
    reader = Reader(path)

    class ClosingOffset:
        def __index__(self) -> int:
            reader.close()
            return 0

    request: Any = (ClosingOffset(), bytearray(1))
    with pytest.raises(ValueError, match="reader is closed"):
        reader.read_into([request])


# What fails underneath; faults of a whole process are played in one of their own


def test_disk_error_names_errno_range_and_file(path: Path, tmp_path: Path) -> None:
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler for the preloaded pread")
    shim = tmp_path / "eio.so"
    source = Path(__file__).with_name("eio_shim.c")
    subprocess.run([cc, "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    code = """if True:
        import sys
        from headrace.native import Reader
        with Reader(sys.argv[1]) as reader:
            good = [bytearray(100), bytearray(100)]
            try:
                reader.read_into([(0, good[0]), (2_000_000, bytearray(900_000)), (9, good[1])])
            except OSError as error:
                print(error.errno, error.filename, error, sep="\\n")
            expected = open(sys.argv[1], "rb").read(109)
            print(good == [expected[:100], expected[9:]], reader.read(9, 100) == expected[9:])
    """
    lines = run_python(code, path, LD_PRELOAD=str(shim), EIO_AT="2500000").splitlines()
    assert lines[:2] == [str(errno.EIO), str(path)]
    assert "Input/output error, reading 900000 bytes at offset 2000000" in lines[2]
    assert lines[3] == "True True"


def test_threads_that_can_not_start_leave_nothing_behind(path: Path) -> None:
    code = """if True:
        import os, resource, sys
        from headrace.native import Reader
        count = lambda: (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        before = count()
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (40 << 20), resource.RLIM_INFINITY))
        try:
            Reader(sys.argv[1], 64)
        except OSError as error:
            print(error.filename, error.strerror)
        print(count() == before)
    """
    lines = run_python(code, path).splitlines()
    assert lines[0].startswith(f"{path} can't start 64 reader threads: ")
    assert lines[1] == "True"


# What is left


def test_opening_and_closing_leaks_no_descriptor_thread_or_reference(path: Path) -> None:
    name = str(path)
    gc.collect()
    before = n_open(), sys.getrefcount(Reader), sys.getrefcount(name)
    for i in range(1000):
        reader = Reader(name, direct=i % 4 < 2)
        if i % 2:
            reader.close()
        del reader
        with pytest.raises(FileNotFoundError):
            Reader(name + "missing")
    gc.collect()
    assert (n_open(), sys.getrefcount(Reader), sys.getrefcount(name)) == before


def test_memory_stays_flat_over_many_reads(reader: Reader) -> None:
    buffers = [bytearray(10_000) for _ in range(8)]
    refused: Any = [(0, buffers[0]), (0, b"read-only")]
    failing = [(0, buffers[0]), ((1 << 63) - 1, buffers[1])]

    def read_often(n: int) -> None:
        for i in range(n):
            reader.read_into([(i * 7 + j, buffer) for j, buffer in enumerate(buffers)])
            reader.read(SIZE - 5000, 10_000)
            with pytest.raises(TypeError):
                reader.read_into(refused)
            with pytest.raises(OSError, match="reading 10000 bytes"):
                reader.read_into(failing)

    read_often(200)
    gc.collect()
    before_bytes, before_blocks = resident_bytes(), sys.getallocatedblocks()
    read_often(2000)
    gc.collect()
    assert resident_bytes() - before_bytes < 2 * MIB
    assert sys.getallocatedblocks() - before_blocks < 500


def test_two_imports_have_types_of_their_own(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(_streamer.__name__, _streamer.__file__)
    assert spec is not None
    assert spec.loader is not None
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    assert second.Reader is not Reader
    with second.Reader(path) as reader:
        assert isinstance(reader.stats(), second.ReaderStats)
        assert not isinstance(reader.stats(), _streamer.ReaderStats)
