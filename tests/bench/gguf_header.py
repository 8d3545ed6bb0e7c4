"""Time the reading of a GGUF header with a 150,000-token vocabulary; target: under 0.3 s.

In the timed window: read_model() and check_runnable(), as the server does for each file at its
start. Outside it: the interpreter's start and imports, writing the file, and the disk (the file was
just written, so the page cache has it). Decoding the arrays, which only /api/show with verbose asks
for, is timed as a second result. Run: python tests/bench/gguf_header.py
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from headrace.engine.gguf import Array, Header, check_runnable, read_model

N_TOKENS = 150_000
N_BLOCKS = 64
N_TENSORS_PER_BLOCK = 12
N_RUNS = 20


def write_model(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(N_BLOCKS)
    writer.add_tokenizer_model("gpt2")
    tokens = [f"token{i}" for i in range(N_TOKENS)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * N_TOKENS)
    writer.add_token_scores([0.0] * N_TOKENS)
    writer.add_token_merges([f"tok en{i}" for i in range(N_TOKENS)])
    for block in range(N_BLOCKS):
        for i in range(N_TENSORS_PER_BLOCK):
            writer.add_tensor(f"blk.{block}.t{i}.weight", np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path) -> Header:
    header = read_model(path)
    check_runnable(header)
    return header


def decode(header: Header) -> None:
    for value in header.metadata.values():
        if isinstance(value, Array):
            value.values()


def measure(what: str, timed: Callable[[], object]) -> dict[str, object]:
    """Return the seconds that timed takes; spread is from the fastest run to the slowest."""
    seconds = []
    for _ in range(N_RUNS):
        start_ns = time.perf_counter_ns()
        timed()
        seconds.append((time.perf_counter_ns() - start_ns) / 1e9)
    return {
        "what": what,
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "commit": commit(),
        "n": N_RUNS,
        "median": round(statistics.median(seconds), 4),
        "spread": [round(min(seconds), 4), round(max(seconds), 4)],
    }


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "none"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path)
        header = read(path)
        results = [
            measure(f"seconds to read a header, {N_TOKENS} tokens", lambda: read(path)),
            measure(f"seconds to decode its arrays, {N_TOKENS} tokens", lambda: decode(header)),
        ]
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
