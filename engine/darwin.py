"""The CPUs of a Mac, as its sysctl prints them. Never run on a Mac yet, only on recorded output."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from headrace.engine.system_files import parse_number

# Level 0 is the fastest kind of core; a Mac with an Intel CPU has no levels.
PERFORMANCE_CORES = "hw.perflevel0.physicalcpu"
CORES = "hw.physicalcpu"
CPU_MODEL = "machdep.cpu.brand_string"


def read_sysctl() -> dict[str, str]:
    """Return the values of the names above that this Mac has."""
    # Not with -n: a name that it does not have leaves no line, and nothing else to tell by.
    names = (PERFORMANCE_CORES, CORES, CPU_MODEL)
    run = subprocess.run(["sysctl", *names], stdout=subprocess.PIPE, text=True, check=False)
    return parse_sysctl(run.stdout)


def parse_sysctl(text: str) -> dict[str, str]:
    """Return names and values of the lines "name: value" that sysctl prints."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def performance_cores(values: Mapping[str, str]) -> int:
    """Return how many cores of the fastest kind there are, at least one."""
    counts = (parse_number(values.get(name, "")) for name in (PERFORMANCE_CORES, CORES))
    return next((n for n in counts if n), 1)
