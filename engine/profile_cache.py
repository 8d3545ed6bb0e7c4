"""Profiles of this machine as files: which one is this machine's, and reading it.

In: facts about the machine. Out: a Profile, or none. Does not know how one is measured.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from headrace.engine.cache_files import cache_folder, write_atomically
from headrace.engine.hardware import Topology
from headrace.engine.profile import Profile


class Facts(msgspec.Struct, frozen=True):
    """All that a profile depends on; when one of them changes, another is measured."""

    topology: str
    n_threads: int
    kernel: str

    @property
    def key(self) -> str:
        """A short name for these facts."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class _File(msgspec.Struct, frozen=True):
    version: int
    profile: Profile


def read_facts(topology: Topology, n_threads: int) -> Facts:
    """Return the facts of this machine for profiles with so many compute threads."""
    system = os.uname()
    return Facts(repr(topology), n_threads, f"{system.sysname} {system.release}")


def profile_path(key: str) -> Path:
    """Return where the profile of that key is kept."""
    return cache_folder() / f"profile-{key}.json"


def read_profile(key: str) -> Profile | None:
    """Return the profile that is kept for key; None if there is none."""
    try:
        return msgspec.json.decode(profile_path(key).read_bytes(), type=_File).profile
    except FileNotFoundError:
        return None


def keep_profile(profile: Profile) -> None:
    """Keep profile for later processes."""
    write_atomically(profile_path(profile.key), msgspec.json.encode(_File(1, profile)))
