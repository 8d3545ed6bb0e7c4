"""The forecast beside what is measured: a model, a budget, tokens/s said and tokens/s had.

Needs the models of streaming.py (the same folder argument) and a quiet machine. The machine is
measured first; each model runs once before it is measured: what that run learnt of its experts and,
after 64 tokens, of its speed is known then. A cache folder of its own keeps it from the user's.
Wanted: each within 25 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from big_models import DENSE, MOE, build_big
from reporting import report, smollm2

N_TOKENS = {"smollm2": 64, "dense": 24, "moe": 64}
BUDGETS: dict[str, tuple[str, ...]] = {
    "smollm2": ("0",), "moe": ("6GiB", "4GiB", "3GiB"), "dense": ("0", "3GiB", "2.5GiB", "2GiB"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(BUDGETS))
    arguments = parser.parse_args()
    paths = {"smollm2": smollm2()}
    paths |= {shape.name: build_big(shape, arguments.folder) for shape in (DENSE, MOE)}
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "XDG_CACHE_HOME": cache}
        for name, budgets in BUDGETS.items():
            if arguments.only in (None, name):
                headrace("profile", str(paths[name]), environ=environ)
                for budget in budgets:
                    compare(name, paths[name], budget, environ)


def compare(name: str, path: Path, budget: str, environ: dict[str, str]) -> None:
    """Report the forecast of one model in one budget, and how right it was."""
    flags = (str(path), "--memory", budget)
    n_tokens = N_TOKENS[name]
    tests = ("-p", "16", "-n", str(n_tokens), "-r", "1")
    prompt = ("--prompt", "What is a river, and why?", "--max-tokens", str(2 * n_tokens))
    headrace("run", *flags, *prompt, environ=environ)
    inspection = headrace("inspect", *flags, "--json", environ=environ)
    said = inspection["forecast"]["decode_tokens_per_s"]
    speeds = headrace("bench", *flags, *tests, "--json", environ=environ)["headrace"][
        "tokens_per_s"
    ]
    measured = speeds[f"tg{n_tokens} warm"]["median"]
    what = f"{name}, --memory {budget}, {inspection['plan']['mode']}: measured / forecast"
    report(
        what, [measured / said], "ratio", measured=round(measured, 3), forecast=round(said, 3),
        limit=inspection["forecast"]["limit"], wanted="0.8 to 1.25",
    )  # fmt: skip


def headrace(*arguments: str, environ: dict[str, str]) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints, if it prints one."""
    command = [sys.executable, "-m", "headrace.server", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout) if "--json" in arguments else {}
    return found


if __name__ == "__main__":
    main()
