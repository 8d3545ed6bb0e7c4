"""A memory limit for a child process: a cgroup of its own, version 1 or 2.

In: bytes. Out: the folder of a cgroup that a process can be put into. Needs root, and a memory
controller that reaches that far; where there is none, it says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.engine.system_files import cgroup_levels

logger = logging.getLogger(__name__)

# The kernel needs a moment after the last process of a cgroup has ended.
_REMOVAL_S = 5.0


@contextlib.contextmanager
def memory_limit(n_bytes: int) -> Iterator[Path]:
    """Make a cgroup whose processes together get n_bytes, and remove it when they have ended.

    Page cache that they fill counts; what others had filled before does not.

    Raises:
        OSError: there is no memory controller, or no right to make a cgroup under it.

    Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
    """
    is_v2, levels = cgroup_levels(Path("/"), "memory")
    present = [level for level in levels if level.is_dir()]
    # In version 2 a cgroup that holds processes, as ours does, has no controllers to hand down.
    above = present[1:2] if is_v2 and len(present) > 1 else present[:1]
    group = (above or levels)[0] / f"headrace-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(n_bytes))
        yield group
    finally:
        _remove(group)


def enter(group: Path, pid: int) -> None:
    """Move the process pid into group.

    Raises:
        OSError: there is no right to.
    """
    (group / "cgroup.procs").write_text(str(pid))


def _remove(group: Path) -> None:
    end = time.monotonic() + _REMOVAL_S
    while True:
        try:
            group.rmdir()
            return
        except OSError as error:
            if time.monotonic() > end:
                logger.warning("%s: can't be removed: %s", group, str(error.strerror).lower())
                return
            time.sleep(0.05)
