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
from reporting import report, smollm2
from serving import Server, stream

from headrace.config.settings import Settings
from headrace.engine.gguf import read_model
from headrace.engine.hardware import this_machine
from headrace.engine.library import Library
from headrace.engine.memory import spare_bytes
from headrace.engine.placement import plan_load, plan_model
from headrace.engine.tensors import read_tensors

LIMITS_MIB = (1536, 2048, 3072, 4096, 8192)
NAMES = ("smollm2", "dense", "moe")
# What the server's interpreter and the engine's have taken when the budget is read.
INTERPRETERS_MIB = 110
# In less even a server without a model has no room.
LEAST_MIB = 600
# Of prose, in the tokenizer that all three models have: 1,000 tokens.
N_PROMPT_CHARACTERS = 4060


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--limit", type=int, action="append", help="MiB; instead of all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing is known of the machine or the experts
        for name in NAMES:
            if arguments.only in (None, name):
                path = find(name, arguments.folder)
                for limit_mib in arguments.limit or (*LIMITS_MIB, *narrow_limits_mib(path)):
                    run(name, path, limit_mib, Path(cache) / "log")


def find(name: str, folder: Path) -> Path:
    """Return the model of that name, made if it is not in folder."""
    shapes = {shape.name: shape for shape in (DENSE, MOE)}
    return build_big(shapes[name], folder) if name in shapes else smollm2()


def narrow_limits_mib(path: Path) -> tuple[int, ...]:
    """Return the limits at which the model at path only just does not fit, or only just does."""
    header = read_model(path)
    load = plan_load(Library([path]).models[0], Settings(), this_machine())
    whole = plan_model(header, read_tensors(header), load, 1 << 50).n_bytes
    edge = INTERPRETERS_MIB + next(n for n in range(1 << 20) if spare_bytes(n * MIB) >= whole)
    narrow = int(path.stat().st_size / 1.02) // MIB, int(edge / 1.02), int(edge * 1.02)
    return tuple(limit for limit in narrow if limit > LEAST_MIB)


def run(name: str, path: Path, limit_mib: int, log: Path) -> None:
    """Report one model in one limit."""
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
        figures["error"] = server.log().rsplit("error: ", 1)[-1].splitlines()[0]
    finally:
        server.stop()
        figures |= group.figures()
        group.remove()
    speed = figures.pop("tokens_per_s")
    size_mib = round(path.stat().st_size / MIB)
    report(f"{name} in {limit_mib} MiB, decode", [speed], "tokens/s", file_mib=size_mib, **figures)


def ask(server: Server) -> dict[str, Any]:
    """Return what one request took, and how the model was loaded."""
    text = "\n".join(topics[key] for key in ("compound", "objects", "typesmapping", "numbers"))
    options = {"temperature": 0, "num_predict": 64}
    body = {"model": server.names()[0], "prompt": text[:N_PROMPT_CHARACTERS], "options": options}
    records = stream(server.url, "/api/generate", body, timeout_s=900)
    last = records[-1].data
    if "error" in last:
        raise RuntimeError(last["error"])
    tiers = httpx.get(f"{server.url}/api/ps").json()["models"][0]["headrace"]
    return {
        "tokens_per_s": last["eval_count"] / (last["eval_duration"] / 1e9),
        "prompt_s": round(last["prompt_eval_duration"] / 1e9, 2),
        "n_prompt": last["prompt_eval_count"],
        "n_generated": last["eval_count"],
        "mode": tiers["mode"],
        "budget_mib": tiers["budget_bytes"] // MIB,
        "resident_mib": tiers["resident_bytes"] // MIB,
        "stream_mib": tiers["stream_bytes"] // MIB,
    }


if __name__ == "__main__":
    main()
