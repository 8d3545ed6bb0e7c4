"""What was learnt of a model's experts, kept from one run to the next in the user's cache folder.

In: a model's header, and how often its experts were chosen. Out: the same of the runs before.
Written when a model is unloaded, never while it answers. Knows no weights.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from headrace.engine.cache_files import cache_folder, write_atomically
from headrace.engine.gguf import Header
from headrace.engine.routing import ExpertUsage
from headrace.engine.tensors import ExpertBlock

logger = logging.getLogger(__name__)

_VERSION = 1


class _Kept(msgspec.Struct, frozen=True):
    """The content of a file."""

    version: int
    counts: tuple[tuple[int, ...], ...]
    cached_share: float
    hit_rate: float


def model_key(header: Header) -> str:
    """Return a short name for what is learnt of a model: one for each tensor table and name."""
    name = header.metadata.get("general.name", "")
    tensors = [(t.name, t.type_id, t.shape, t.offset_bytes) for t in header.tensors]
    return hashlib.sha256(repr((header.architecture, name, tensors)).encode()).hexdigest()[:24]


def usage_path(header: Header) -> Path:
    """Return the file that keeps the usage of a model."""
    return cache_folder() / f"experts-{model_key(header)}.json"


def read_usage(header: Header, blocks: tuple[ExpertBlock, ...]) -> ExpertUsage | None:
    """Return what was learnt of the experts of blocks; None if nothing was, or can't be read."""
    path = usage_path(header)
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s: can't be read, and is learnt anew: %s", path, error)
        return None
    if kept.version != _VERSION or [len(c) for c in kept.counts] != [b.n_experts for b in blocks]:
        return None
    counts = tuple(np.array(c, dtype=np.int64) for c in kept.counts)
    return ExpertUsage(counts, kept.cached_share, kept.hit_rate)


def narrowed(
    usage: ExpertUsage, blocks: tuple[ExpertBlock, ...], streamed: Collection[int]
) -> ExpertUsage:
    """Return the usage of those of blocks whose numbers are in streamed."""
    places = [i for i, block in enumerate(blocks) if block.block in streamed]
    return replace(usage, counts=tuple(usage.counts[i] for i in places))


def widened(
    usage: ExpertUsage, blocks: tuple[ExpertBlock, ...], streamed: Collection[int]
) -> ExpertUsage:
    """Return the usage of blocks from that of streamed ones; nothing is known of the others."""
    counts = iter(usage.counts)
    every = (
        next(counts) if block.block in streamed else np.zeros(block.n_experts, np.int64)
        for block in blocks
    )
    return replace(usage, counts=tuple(every))


def keep_usage(header: Header, usage: ExpertUsage, before: ExpertUsage | None) -> None:
    """Write usage, with half of what was learnt before: what is asked of a model changes.

    Of blocks that were not used at all everything stays.
    """
    counts = usage.counts
    if before is not None:
        pairs = zip(counts, before.counts, strict=True)
        counts = tuple(new + old // 2 if new.any() else old for new, old in pairs)
    kept = _Kept(
        _VERSION, tuple(tuple(map(int, c)) for c in counts), usage.cached_share, usage.hit_rate
    )
    write_atomically(usage_path(header), msgspec.json.encode(kept))
