"""A cgroup with a memory limit for a benchmark's processes, and what happened in it; needs root."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

MIB = 1 << 20


class Cgroup:
    """A cgroup of ours with a memory limit and no swap; version 1 or 2."""

    def __init__(self, limit_bytes: int, name: str = "") -> None:
        root = Path("/sys/fs/cgroup")
        self.is_v2 = (root / "cgroup.controllers").exists()
        self.folder = (
            root if self.is_v2 else root / "memory"
        ) / f"headrace-bench-{os.getpid()}{name}"
        self.folder.mkdir()
        limit = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        (self.folder / limit).write_text(str(limit_bytes))

    def enter(self) -> None:
        """Move the calling process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def figures(self) -> dict[str, int]:
        """Return the peak of memory and how often the limit was hit."""
        if self.is_v2:
            events = dict(line.split() for line in self._read("memory.events").splitlines())
            return {
                "cgroup_peak_mib": int(self._read("memory.peak")) // MIB,
                "limit_hits": int(events["max"]),
                "oom_kills": int(events["oom_kill"]),
            }
        oom = dict(line.split() for line in self._read("memory.oom_control").splitlines())
        return {
            "cgroup_peak_mib": int(self._read("memory.max_usage_in_bytes")) // MIB,
            "limit_hits": int(self._read("memory.failcnt")),
            "oom_kills": int(oom.get("oom_kill", 0)),
        }

    def remove(self) -> None:
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text()


def drop_cache(path: Path) -> None:
    """Drop the file's page cache, which counts for the group that read it first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
