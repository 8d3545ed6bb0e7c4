"""A server that is told nothing of memory, in cgroups of several limits: mode, speed, peak, kills.

Needs root, a cgroup memory controller and the models of streaming.py (the same folder argument).
Each case starts `serve` in a limit without --memory, asks for 64 tokens after a prompt of 1,000,
and reports what headrace chose and what it took. The last three limits of a model are where it only
just does not fit: its file is 1.02 times the limit; and 2 % below and above the limit where all
weights stay in memory. Wanted: an answer wherever there is a plan, and no kill.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
from big_models import DENSE, MOE, build_big
from cgroup import MIB, Cgroup, drop_cache
from reporting import report
from serving import Server, stream

from headrace.config.settings import Settings
from headrace.engine.gguf import read_model
from headrace.engine.hardware import this_machine
from headrace.engine.library import Library
from headrace.engine.memory import spare_bytes
from headrace.engine.placement import plan_load, plan_model
from headrace.engine.tensors import read_tensors

LIMITS_MIB = (1536, 2048, 3072, 4096, 8192)
SHAPES = {shape.name: shape for shape in (MOE, DENSE)}
# What the server's interpreter and the engine's have taken when the budget is read.
INTERPRETERS_MIB = 110
# Of prose, in the tokenizer that both models have: 1,000 tokens.
N_PROMPT_CHARACTERS = 4060
COLUMNS = {
    "mode, or why there is none": "outcome", "budget, MiB": "budget_mib", "context": "n_ctx",
    "s to load": "load_s", "s for 1,000 tokens": "prompt_s", "peak, MiB": "cgroup_peak_mib",
    "limit hits": "limit_hits", "kills": "oom_kills",
}  # fmt: skip
HEAD = f"| model | limit, MiB | file / limit | tokens/s | {' | '.join(COLUMNS)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(SHAPES))
    parser.add_argument("--limit", type=int, action="append", help="MiB; instead of all")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing is known of the machine or the experts
        for name, shape in SHAPES.items():
            if arguments.only in (None, name):
                path = build_big(shape, arguments.folder)
                for limit_mib in arguments.limit or (*LIMITS_MIB, *narrow_limits_mib(path)):
                    rows.append(run(name, path, limit_mib, Path(cache) / "log"))
    print("\n".join([HEAD, f"|{'---|' * (HEAD.count('|') - 1)}", *rows]))


def narrow_limits_mib(path: Path) -> tuple[int, ...]:
    """Return the limits at which the model at path only just does not fit, or only just does."""
    header = read_model(path)
    load = plan_load(Library([path]).models[0], Settings(), this_machine())
    whole = plan_model(header, read_tensors(header), load, 1 << 50).n_bytes
    edge = INTERPRETERS_MIB + next(n for n in range(1 << 20) if spare_bytes(n * MIB) >= whole)
    return int(path.stat().st_size / 1.02) // MIB, int(edge / 1.02), int(edge * 1.02)


def run(name: str, path: Path, limit_mib: int, log: Path) -> str:
    """Report one model in one limit, and return its row of the table."""
    drop_cache(path)  # pages that others have read would not count
    group = Cgroup(limit_mib * MIB, name)
    launcher = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.folder / "cgroup.procs")]
    launcher += [sys.executable, "-m", "headrace.server"]
    started = time.monotonic()
    server = Server(path, log, launcher=launcher)
    figures: dict[str, Any]
    try:
        server.wait_ready(120)
        figures = {"load_s": round(time.monotonic() - started, 2), **ask(server)}
    except RuntimeError:  # the end of the log says why
        figures = {"ended_s": round(time.monotonic() - started, 2), "tokens_per_s": 0.0}
        figures["outcome"] = server.log().rsplit("error: ", 1)[-1].splitlines()[0]
    finally:
        server.stop()
        figures |= group.figures()
        group.remove()
    speed = figures.pop("tokens_per_s")
    size_mib = round(path.stat().st_size / MIB)
    report(f"{name} in {limit_mib} MiB, decode", [speed], "tokens/s", file_mib=size_mib, **figures)
    ratio = size_mib / limit_mib
    cells = [name, limit_mib, f"{ratio:.2f}", *(figures.get(key, "") for key in COLUMNS.values())]
    cells.insert(3, f"{speed:.2f}")
    return f"| {' | '.join(map(str, cells))} |"


def ask(server: Server) -> dict[str, Any]:
    """Return what one request took, and how the model was loaded."""
    text = "\n".join(topics[key] for key in ("compound", "objects", "typesmapping", "numbers"))
    options = {"temperature": 0, "num_predict": 64}
    body = {"model": server.names()[0], "prompt": text[:N_PROMPT_CHARACTERS], "options": options}
    records = stream(server.url, "/api/generate", body, timeout_s=900)
    last = records[-1].data
    if "error" in last:
        raise RuntimeError(last["error"])
    resident = httpx.get(f"{server.url}/api/ps").json()["models"][0]
    tiers = resident["headrace"]
    return {
        "tokens_per_s": last["eval_count"] / (last["eval_duration"] / 1e9),
        "prompt_s": round(last["prompt_eval_duration"] / 1e9, 2),
        "n_prompt": last["prompt_eval_count"],
        "n_generated": last["eval_count"],
        "outcome": tiers["mode"],
        "n_ctx": resident["context_length"],
        "budget_mib": tiers["budget_bytes"] // MIB,
        "resident_mib": tiers["resident_bytes"] // MIB,
        "stream_mib": tiers["stream_bytes"] // MIB,
    }


if __name__ == "__main__":
    main()
