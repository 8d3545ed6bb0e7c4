"""How far forecasts of a model were off, kept from one run to the next in the user's cache folder.

In: a model's header, the key of the machine's profile, a plan's way. Out: what forecasts of that
model that way are corrected by. Written when a model is unloaded, never while it answers. Does not
know how a correction is found.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from headrace.engine.cache_files import cache_folder, write_atomically
from headrace.engine.forecast import Correction
from headrace.engine.gguf import Header
from headrace.engine.usage import model_key

logger = logging.getLogger(__name__)

_VERSION = 2


class _Kept(msgspec.Struct, frozen=True):
    """The content of a file; of another profile's forecasts it says nothing."""

    version: int
    profile_key: str
    corrections: dict[str, Correction]


def corrections_path(header: Header) -> Path:
    """Return the file that keeps the corrections of a model."""
    return cache_folder() / f"corrections-{model_key(header)}.json"


def read_corrections(header: Header, profile_key: str) -> dict[str, Correction]:
    """Return what was learnt of a model on the machine of that profile, by the way it ran."""
    path = corrections_path(header)
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s: can't be read, and is learnt anew: %s", path, error)
        return {}
    if (kept.version, kept.profile_key) != (_VERSION, profile_key):
        return {}
    return kept.corrections


def keep_correction(header: Header, profile_key: str, way: str, correction: Correction) -> None:
    """Keep correction for later forecasts of a model that way, beside those of others."""
    corrections = read_corrections(header, profile_key) | {way: correction}
    kept = _Kept(_VERSION, profile_key, corrections)
    write_atomically(corrections_path(header), msgspec.json.encode(kept))
