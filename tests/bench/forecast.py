"""The forecast beside what is measured: a model, a budget, what was said and what was had.

Needs the models of streaming.py (the same folder argument), some 25 minutes and a quiet machine,
which is measured first. Each model runs twice before it is measured: what that taught of its
experts, its loading, a prompt and, after 64 tokens, its speed is known then. A cache folder of its
own (--cache keeps it) is not the user's. Wanted: decode within 25 %; TTFT and load are told beside.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from big_models import DENSE, MOE, build_big
from reporting import report, smollm2

N_TOKENS = {"smollm2": 64, "dense": 12, "moe": 64}
BUDGETS: dict[str, tuple[str, ...]] = {
    "smollm2": ("0",), "moe": ("6GiB", "4GiB", "3GiB"), "dense": ("0", "3GiB", "2.5GiB", "2GiB"),
}  # fmt: skip
# Some 1,000 tokens of English prose that every Python comes with.
PROSE = "\n".join(topics[key] for key in ("compound", "objects"))[:4200]


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one budget; pairs are of what was measured and what was said."""

    what: str
    decode: tuple[float, float]
    spread: tuple[float, float]
    ttft: tuple[float, float]
    load: tuple[float, float]

    def __str__(self) -> str:
        (decode, said), (low, high) = self.decode, self.spread
        cells = [self.what, f"{decode:.3g} ({low:.3g} to {high:.3g})", f"{said:.3g}"]
        cells.append(f"{decode / said:.2f}")
        for measured, expected in (self.ttft, self.load):
            cells.append(f"{measured:.3g} / {expected:.3g} = {measured / expected:.2f}")
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| model, memory, mode | decode measured, tokens/s | forecast | ratio"
    " | s to 1000 tokens, measured / forecast | s to load, measured / forecast |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(BUDGETS))
    parser.add_argument("--budget", help="one of the budgets, as README writes them; 0: none")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="keep what is learnt there")
    arguments = parser.parse_args()
    paths = {"smollm2": smollm2()}
    paths |= {shape.name: build_big(shape, arguments.folder) for shape in (DENSE, MOE)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "XDG_CACHE_HOME": str(arguments.cache or folder)}
        for name, budgets in BUDGETS.items():
            if arguments.only in (None, name):
                headrace("profile", str(paths[name]), environ=environ)
                rows += [
                    compare(name, paths[name], budget, arguments.runs, environ)
                    for budget in budgets
                    if arguments.budget in (None, budget)
                ]
    rules = re.sub(r"[^|]+", " --- ", HEAD)
    print(HEAD, rules, *rows, sep="\n", file=sys.stderr)


def compare(name: str, path: Path, budget: str, n_runs: int, environ: dict[str, str]) -> Row:
    """Report the forecast of one model in one budget, and how right it was."""
    flags = (str(path), "--memory", budget)
    n_tokens = N_TOKENS[name]
    prose = ("--prompt", PROSE, "--max-tokens", "1", "--verbose")
    headrace("run", *flags, *prose, environ=environ)
    # Not behind that prompt: bench's answers have no long context either.
    answer = ("--prompt", "What is a river, and why?", "--max-tokens", str(2 * n_tokens))
    headrace("run", *flags, *answer, environ=environ)
    tests = ("-p", "16", "-n", str(n_tokens), "-r", str(n_runs))
    done = json.loads(headrace("bench", *flags, *tests, "--json", environ=environ)[0])["headrace"]
    found, said = done["tokens_per_s"][f"tg{n_tokens} warm"], done["forecast"]
    told = headrace("run", *flags, *prose, environ=environ)[1]
    rate = re.search(r"prompt eval rate: +([0-9.]+)", told)
    assert rate is not None, told
    row = Row(
        what=f"{name}, --memory {budget}, {done['mode']}",
        decode=(found["median"], said["decode_tokens_per_s"]),
        spread=(found["lowest"], found["highest"]),
        ttft=(1000 / float(rate[1]), said["ttft_s_per_1000_tokens"]),
        load=(statistics.median(done["load_s"]["runs"]), said["load_s"]),
    )
    tell(row, found["runs"], said)
    return row


def tell(row: Row, speeds: list[float], said: dict[str, Any]) -> None:
    """Report what was measured and what was said, of each a line."""
    report(
        f"{row.what}: decode measured / forecast", [speed / row.decode[1] for speed in speeds],
        "ratio", measured=round(row.decode[0], 3), forecast=round(row.decode[1], 3),
        limit=said["limit"], correction=round(said["correction"], 3),
        hit_rate=said["expert_hit_rate"], wanted="0.8 to 1.25",
    )  # fmt: skip
    for what, (measured, expected) in (("1,000 tokens", row.ttft), ("load", row.load)):
        report(
            f"{row.what}: seconds of {what}, measured / forecast", [measured / expected], "ratio",
            measured=round(measured, 3), forecast=round(expected, 3),
        )  # fmt: skip


def headrace(*arguments: str, environ: dict[str, str]) -> tuple[str, str]:
    """Run a command and return what it prints to stdout and to stderr."""
    command = [sys.executable, "-m", "headrace.server", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stderr}")
    return done.stdout, done.stderr


if __name__ == "__main__":
    main()
