"""Files that hold what headrace found out and could find out again, in the user's cache folder."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

import platformdirs

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the folder of the cache files, which may not exist yet."""
    return platformdirs.user_cache_path("headrace")


def write_atomically(path: Path, data: bytes) -> None:
    """Let the file at path hold data: all of it, or if that can't be, what it held before.

    A folder that can't be written to is a warning: what is not kept will be found out again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
    except OSError as error:
        logger.warning("%s: can't be written: %s", path, str(error.strerror).lower())


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
