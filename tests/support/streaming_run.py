"""One measurement of a model larger than memory, in a process of its own; JSON on stdout.

In: a model, how to run it, and the tokens of English text. Out: speeds and what was read. The text
is fed token by token (or as one prompt), whatever the model would have said.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from pydoc_data.topics import topics

from headrace.engine import gguf, hardware, llama, placement
from headrace.engine.context_plan import kv_bytes_per_cell
from headrace.engine.openmp import openmp_environment  # noqa: F401  (the parent sets it)
from headrace.engine.plan import N_IO_THREADS
from headrace.engine.streaming import WeightStream
from headrace.engine.tensors import read_tensors
from headrace.engine.weights import StreamStats

N_CTX = 1024


def english(vocab: llama.Vocab, n_tokens: int) -> list[int]:
    """Return the first tokens of some English prose that every Python comes with."""
    text = "\n".join(topics[key] for key in ("compound", "objects", "typesmapping", "numbers"))
    return vocab.tokenize(text, parses_control=False)[:n_tokens]


def load(arguments: argparse.Namespace) -> tuple[llama.Model, int]:
    """Return the model, and the physical batch it may use."""
    if arguments.how == "mmap":
        return llama.Model(arguments.model, repacks=False), arguments.n_batch
    header = gguf.read_model(arguments.model)
    table = read_tensors(header)
    kv_bytes = N_CTX * kv_bytes_per_cell(header, "f16")
    plan = placement.plan_weights(
        header, table, mode=arguments.mode, budget_bytes=arguments.memory, kv_bytes=kv_bytes,
        n_batch=arguments.n_batch, n_slots=1,
    )  # fmt: skip
    stream = WeightStream(
        header, plan, llama.streaming_functions(), n_threads=arguments.io_threads,
        policy=arguments.policy, lookahead=arguments.lookahead,
    )  # fmt: skip
    return llama.Model(arguments.model, stream=stream), plan.n_ubatch


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("how", choices=["mmap", "stream"])
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--io-threads", type=int, default=N_IO_THREADS)
    parser.add_argument("--policy", type=int, default=3)
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--warm", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--n-batch", type=int, default=512)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    n_threads = arguments.threads or hardware.this_machine().default_threads
    llama.start_backend()
    started = time.perf_counter()
    model, n_ubatch = load(arguments)
    load_s = time.perf_counter() - started
    context = llama.Context(
        model, n_cells=N_CTX, n_seqs=1, n_batch=arguments.n_batch, n_threads=n_threads,
        n_threads_batch=n_threads, n_ubatch=n_ubatch,
    )  # fmt: skip
    n_prompt = arguments.prefill or arguments.warm
    tokens = english(model.vocab, n_prompt + arguments.tokens)
    batch = llama.Batch(arguments.n_batch)
    started = time.perf_counter()
    if arguments.prefill:
        batch.fill_prompt(tokens[:n_prompt], 0, 0, True)
        assert context.decode(batch) == 0
    else:
        decode(context, batch, tokens[:n_prompt], 0)
    prompt_s = time.perf_counter() - started
    before = model.stream.stats() if model.stream else None
    usage, io_cpu_s = resource.getrusage(resource.RUSAGE_SELF), io_threads_cpu_s()
    started = time.perf_counter()
    decode(context, batch, tokens[n_prompt:], n_prompt)
    decode_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    result = {
        "load_s": round(load_s, 2),
        "prompt_tokens_per_s": round(n_prompt / prompt_s, 3),
        "tokens_per_s": round(arguments.tokens / decode_s, 3),
        "decode_s": round(decode_s, 2),
        "user_s": round(after.ru_utime - usage.ru_utime, 2),
        "system_s": round(after.ru_stime - usage.ru_stime, 2),
        "major_faults": after.ru_majflt - usage.ru_majflt,
        "peak_rss_mib": after.ru_maxrss >> 10,
        "n_ubatch": n_ubatch,
    }
    if before is not None and model.stream is not None:
        result |= stream_figures(before, model.stream.stats(), decode_s)
        gb_read = (model.stream.stats().bytes_read - before.bytes_read) / 1e9
        result["io_cpu_s_per_gb"] = round((io_threads_cpu_s() - io_cpu_s) / max(gb_read, 1e-9), 4)
    print(json.dumps(result), flush=True)


def io_threads_cpu_s() -> float:
    """Return the CPU time that the threads which read weights have had so far."""
    tasks = Path("/proc/self/task").iterdir()
    readers = [t for t in tasks if (t / "comm").read_text().strip() == "headrace-reader"]
    return sum(int((t / "schedstat").read_text().split()[0]) for t in readers) / 1e9


def stream_figures(
    before: StreamStats, now: StreamStats, decode_s: float
) -> dict[str, float | None]:
    """Return what was read between two stats of a stream, decode_s seconds apart."""
    read = now.bytes_read - before.bytes_read
    n_chosen = now.n_hits + now.n_misses - before.n_hits - before.n_misses
    return {
        "read_mb": round(read / 1e6, 1),
        "read_mb_per_s": round(read / decode_s / 1e6, 1),
        "read_mb_per_busy_s": round(read / max(now.busy_ns - before.busy_ns, 1) * 1e3, 1),
        "busy_share": round((now.busy_ns - before.busy_ns) / decode_s / 1e9, 3),
        "stall_share": round((now.stall_ns - before.stall_ns) / decode_s / 1e9, 3),
        "n_guesses": now.n_guesses - before.n_guesses,
        "n_useful": now.n_useful - before.n_useful,
        "n_late": now.n_late - before.n_late,
        "hit_rate": round((now.n_hits - before.n_hits) / n_chosen, 3) if n_chosen else None,
        "stream_mib": now.resident_bytes >> 20,
    }


def decode(context: llama.Context, batch: llama.Batch, tokens: list[int], first: int) -> None:
    for i, token in enumerate(tokens):
        batch.fill([token], [first + i], [0], [True])
        assert context.decode(batch) == 0


if __name__ == "__main__":
    main()
