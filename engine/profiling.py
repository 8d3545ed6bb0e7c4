"""The profile of this machine: what is known is read, what is missing is measured once and kept.

In: tensor types and a file, of a model at hand or by default. Out: a Profile that has them. The
measuring is done by a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
from gguf import GGMLQuantizationType

from headrace.engine.disk import covers, locate
from headrace.engine.gguf import Header
from headrace.engine.hardware import Topology
from headrace.engine.messages import Measure, Measured
from headrace.engine.profile import Profile
from headrace.engine.profile_cache import keep_profile, read_facts, read_profile
from headrace.engine.questions import Progress, measure

# What most models at hand are made of.
DEFAULT_TYPES = {name: int(GGMLQuantizationType[name]) for name in ("Q4_0", "Q4_K", "Q8_0")}
# Tensors of a type that is a smaller part of a model don't decide about its speed.
_LEAST_PART = 0.01


def weight_types(header: Header) -> dict[str, int]:
    """Return names and numbers of the types that the weights of a model have, most bytes first."""
    n_bytes = Counter[tuple[str, int]]()
    for tensor in header.tensors:
        if len(tensor.shape) > 1:
            n_bytes[tensor.type_name, tensor.type_id] += tensor.n_bytes
    least = _LEAST_PART * n_bytes.total()
    return {name: number for (name, number), n in n_bytes.most_common() if n >= least}


def cached_profile(topology: Topology, n_threads: int = 0) -> Profile | None:
    """Return what is known of this machine; None if nothing is. n_threads 0 is the default."""
    return read_profile(read_facts(topology, n_threads or topology.default_threads).key)


def measured_profile(
    topology: Topology, types: Mapping[str, int], path: Path | None = None, *,
    n_threads: int = 0, force: bool = False, progress: Progress = lambda what: None,
) -> Profile:  # fmt: skip
    """Return a profile that has the kernels of types and the disk that holds path.

    What is not known yet is measured, some three seconds for a type and four for a disk, and kept;
    with force all is. n_threads 0 is the default. progress hears what is being measured.

    Raises:
        EngineError: the file can't be read, or the measuring process ended before it was done.
    """
    n_threads = n_threads or topology.default_threads
    key = read_facts(topology, n_threads).key
    known = None if force else read_profile(key)
    wanted = _wanted(known, topology, types, path, n_threads)
    if known is not None and not wanted.types and not wanted.path:
        return known
    profile = _merged(key, n_threads, known, measure(wanted, progress))
    keep_profile(profile)
    return profile


def _wanted(
    known: Profile | None, topology: Topology, types: Mapping[str, int], path: Path | None,
    n_threads: int,
) -> Measure:  # fmt: skip
    """Return what of types and path is not known."""
    if known is not None:
        types = {name: number for name, number in types.items() if known.kernel(name) is None}
        if path is not None:
            device, file_bytes = locate(path)
            disk = known.disk(device)
            if disk is not None and covers(disk, file_bytes):
                path = None
    return Measure(
        n_threads=n_threads,
        # As engine processes do: only where slow cores would otherwise take part.
        cpus=topology.physical_performance_cpus if topology.efficiency_cpus else (),
        types=tuple(types.items()),
        memory_and_gpus=known is None,
        path="" if path is None else str(path),
    )


def _merged(key: str, n_threads: int, known: Profile | None, found: Measured) -> Profile:
    if known is None:
        assert found.memory_bytes_per_s is not None and found.gpus is not None
        assert found.attention_flops is not None
        known = Profile(
            key, n_threads, found.memory_bytes_per_s, (), found.gpus, (), found.attention_flops
        )
    disks = {disk.device: disk for disk in known.disks}
    if found.disk is not None:
        disks[found.disk.device] = found.disk
    return msgspec.structs.replace(
        known, kernels=known.kernels + found.kernels, disks=tuple(disks.values())
    )
