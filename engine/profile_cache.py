"""Profiles of this machine as files: which one is this machine's, and reading and keeping it.

In: facts about the machine. Out: a Profile, or none. Does not know how one is measured.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path

import msgspec

from headrace.engine.cache_files import cache_folder, write_atomically
from headrace.engine.disk import locate
from headrace.engine.hardware import Topology, cpu_model
from headrace.engine.memory import this_memory
from headrace.engine.profile import DiskProfile, Profile

logger = logging.getLogger(__name__)

# One more when the file's form, or what its figures mean, is no longer what it was.
_VERSION = 2


class Facts(msgspec.Struct, frozen=True):
    """All that a profile depends on; when one of them changes, another is measured."""

    cpu: str
    topology: str
    n_threads: int
    memory_bytes: int
    kernel: str
    """The operating system's, such as "Linux 6.1.0"."""
    llama_cpp: str
    headrace: str

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
    return Facts(
        cpu=cpu_model(Path("/")),
        topology=repr(topology),
        n_threads=n_threads,
        memory_bytes=this_memory().physical_bytes,
        kernel=f"{system.sysname} {system.release}",
        llama_cpp=_llama_cpp_build(),
        headrace=importlib.metadata.version("headrace"),
    )


def profile_path(key: str) -> Path:
    """Return where the profile of that key is kept."""
    return cache_folder() / f"profile-{key}.json"


def read_profile(key: str) -> Profile | None:
    """Return the profile that is kept for key; None if there is none that can be used."""
    path = profile_path(key)
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s: can't be used, measuring again: %s", path, error)
        return None
    if (file.version, file.profile.key) != (_VERSION, key):
        found = f"version {file.version} of {file.profile.key}"
        logger.warning(
            "%s: can't be used, measuring again: it is %s, expected version %d of %s",
            path, found, _VERSION, key,
        )  # fmt: skip
        return None
    return file.profile


def read_measured(
    topology: Topology, n_threads: int, path: Path
) -> tuple[Profile, DiskProfile] | None:
    """Return what is kept of this machine and of the disk that holds path; None unless both are.

    A profile without kernels tells nothing of a model either.

    Raises:
        ModelFileError: there is no file at path.
    """
    profile = read_profile(read_facts(topology, n_threads).key)
    device, _ = locate(path)
    disk = profile and profile.disk(device)
    return (profile, disk) if profile and profile.kernels and disk else None


def keep_profile(profile: Profile) -> None:
    """Keep profile for later processes."""
    data = msgspec.json.format(msgspec.json.encode(_File(_VERSION, profile)))
    write_atomically(profile_path(profile.key), data)


def _llama_cpp_build() -> str:
    """Return version and build of the installed llama.cpp, without loading it."""
    version = importlib.metadata.version("llama-cpp-python")
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None, "it is installed, it has a version"
    libraries = sorted((Path(spec.origin).parent / "lib").iterdir())
    # The same version compiled with other options has libraries of other sizes.
    return " ".join([version, *(str(library.stat().st_size) for library in libraries)])
