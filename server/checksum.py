"""`headrace checksum FILE ...`: the SHA-256 of model files, at the disk's direct-read speed.

A process of its own: it uses the engine's far side and is imported only when asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.engine.weights import checksum


def main(arguments: Sequence[str]) -> int:
    """Print digest and name of each file, as sha256sum does; return the exit status.

    Raises:
        ModelFileError: a file can't be read.
    """
    if not arguments or any(argument.startswith("-") for argument in arguments):
        print("usage: headrace checksum FILE ...", file=sys.stderr)
        return 2
    for argument in arguments:
        print(f"{checksum(Path(argument), _progress)}  {argument}", flush=True)
    return 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\r" if done < total else "\r\033[K"
        print(f"{100 * done // total} %", end=end, file=sys.stderr, flush=True)
