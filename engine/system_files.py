"""Words and numbers in the files of /proc and /sys, and where our cgroups are among them.

In: paths below a directory that looks like /. Out: what they hold; nothing, where there is no such
file or it makes no sense. Knows Linux only, and not what the numbers are for.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def read_text(path: Path) -> str:
    """Return what the file at path holds, stripped; "" where there is no such file."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the number that the file at path holds, as parse_number does."""
    return parse_number(read_text(path))


def read_keyed(path: Path, key: str) -> int | None:
    """Return the number after key in a file of lines "key number"."""
    for line in read_text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == key:
            return parse_number(words[1])
    return None


def parse_number(text: str) -> int | None:
    """Return the number that text spells, not negative; None: it spells none."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def cgroup_levels(root: Path, controller: str) -> tuple[bool, list[Path]]:
    """Return whether controller is in cgroup v2, and the folders of our cgroup and its ancestors.

    In a container the path may be the host's, while its own cgroup is mounted as the root: the
    folders that don't exist there hold no limit, and the root, which is in the list, does.

    Source: Linux, cgroups(7), /proc/pid/cgroup; the mount points are systemd's.
    """
    mounts = root / "sys/fs/cgroup"
    is_v2, base, path = True, mounts, "/"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        names, _, line_path = rest.partition(":")
        if controller in names.split(","):
            is_v2, path = False, line_path
            base = mounts / names if (mounts / names).is_dir() else mounts / controller
            break
        if hierarchy == "0" and not names:
            path = line_path
            base = mounts / "unified" if (mounts / "unified").is_dir() else mounts
    parts = PurePosixPath(path.lstrip("/")).parts
    if ".." in parts:  # a cgroup outside the namespace, of which nothing is mounted
        parts = ()
    return is_v2, [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
