"""Which disk holds a file, and which reads of it tell how fast that disk is.

In: paths and sizes. Out: names of devices, the reads to measure. Reads nothing itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from headrace.engine.errors import ModelFileError
from headrace.engine.profile import DiskProfile

REQUEST_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 2, 4, 8, 16)
# With fewer requests in a file the same bytes would be read again and again, and a disk may have
# kept them in memory of its own.
_LEAST_REQUESTS = 64


def locate(path: Path) -> tuple[str, int]:
    """Return the device that holds the file at path, as "major:minor", and the file's bytes.

    Raises:
        ModelFileError: there is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelFileError(f"{path}: {str(error.strerror).lower()}") from error
    return f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}", status.st_size


def measurable_sizes(file_bytes: int) -> tuple[int, ...]:
    """Return the sizes of requests that a file of so many bytes can be measured with."""
    sizes = tuple(n for n in REQUEST_BYTES if n * _LEAST_REQUESTS <= file_bytes)
    return sizes or REQUEST_BYTES[:1]


def covers(disk: DiskProfile, file_bytes: int) -> bool:
    """Tell whether disk was measured with all that a file of so many bytes can be measured with."""
    measured = {point.request_bytes for point in disk.sequential}
    return measured.issuperset(measurable_sizes(file_bytes))
