"""Runs code in a Python process of its own, for what a test can't do to its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parent)


def run_python(code: str, *args: object, **environ: str) -> str:
    """Return what code printed; it finds args in sys.argv, and the modules of tests/support.

    Raises:
        AssertionError: it failed; with its own error output.
    """
    path = os.pathsep.join([SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout
