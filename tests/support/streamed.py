"""Loads a model resident or streamed and returns the logits of one fixed evaluation."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

from headrace.engine import gguf, llama, placement
from headrace.engine.messages import Mode
from headrace.engine.plan import WeightsPlan
from headrace.engine.streaming import WeightStream
from headrace.engine.tensors import read_tensors

N_BATCH = 64
PROMPT = [(i * 37 + 11) % 300 + 3 for i in range(100)]

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """A way to stream: share is how much of what can be streamed is in memory, 0 the least."""

    share: float
    policy: int = 3
    direct: bool = True
    lookahead: int = 2
    repacks: bool = False


def plan(path: Path, share: float, mode: Mode | None = None) -> WeightsPlan:
    """Return a plan that keeps a share of what can be streamed in memory."""
    header = gguf.read_model(path)
    table = read_tensors(header)
    if mode is None:
        mode = "expert-streaming" if table.experts else "dense-ffn-streaming"
    made = placement.plan_weights(
        header, table, mode=mode, budget_bytes=1 << 40, kv_bytes=0, n_batch=N_BATCH, n_slots=4
    )
    if mode == "expert-streaming":
        records, n_ubatch = [], N_BATCH
        for blocks in made.expert_blocks:
            n_experts, least = blocks[0].n_experts, len(blocks) * table.n_used
            n = max(least, round(share * len(blocks) * n_experts))
            records.append(n)
            if n < n_experts:
                n_ubatch = min(n_ubatch, n // table.n_used)
        return replace(made, pool_records=tuple(records), n_ubatch=n_ubatch)
    tensors = [item.tensor for item in table.dense]
    n_kept = min(round(share * len(tensors)), len(tensors) - 1)
    kept = {round(i * len(tensors) / max(n_kept, 1)) for i in range(n_kept)}
    streamed = tuple(t for i, t in enumerate(tensors) if i not in kept)
    return replace(made, mode=mode, streamed=streamed, n_ring_slots=2 if share == 0 else 4)


def load(path: Path, made: WeightsPlan, case: Case) -> llama.Model:
    """Load path streamed by a plan."""
    stream = WeightStream(
        gguf.read_model(path), made, llama.streaming_functions(), n_threads=3,
        direct=case.direct, policy=case.policy, lookahead=case.lookahead,
    )  # fmt: skip
    return llama.Model(path, stream=stream, repacks=case.repacks)


def plain_buffer_type() -> int:
    """Return a buffer type of ggml in which weights are as in the file.

    It is the one of mapped files: of tensors sent to the CPU's own llama.cpp still repacks some.
    """
    lib = llama_cpp.llama_cpp._lib
    lib.ggml_backend_cpu_buffer_from_ptr.restype = ctypes.c_void_p
    lib.ggml_backend_cpu_buffer_from_ptr.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.ggml_backend_buffer_get_type.restype = ctypes.c_void_p
    lib.ggml_backend_buffer_get_type.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_buffer_free.argtypes = [ctypes.c_void_p]
    buffer = lib.ggml_backend_cpu_buffer_from_ptr(None, 0)
    buffer_type = lib.ggml_backend_buffer_get_type(buffer)
    lib.ggml_backend_buffer_free(buffer)
    return int(buffer_type)


class Evaluation:
    """One context, and steps in it whose logits are collected."""

    def __init__(self, model: llama.Model, n_ubatch: int, n_threads: int = 1) -> None:
        self.context = llama.Context(
            model, n_cells=1024, n_seqs=4, n_batch=N_BATCH, n_threads=n_threads,
            n_threads_batch=n_threads, n_ubatch=n_ubatch,
        )  # fmt: skip
        self.batch = llama.Batch(N_BATCH)
        self.logits: list[Logits] = []

    def prefill(self, tokens: list[int], seq_id: int = 0, first: int = 0) -> None:
        for i in range(0, len(tokens), N_BATCH):
            chunk = tokens[i : i + N_BATCH]
            self.batch.fill_prompt(chunk, first + i, seq_id, True)
            assert self.context.decode(self.batch) == 0
            self.logits.append(self.context.logits(len(chunk) - 1).copy())

    def decode(self, positions: dict[int, int], tokens: dict[int, int]) -> dict[int, int]:
        """Evaluate one token of each sequence; return the likeliest next ones."""
        ids = list(positions)
        self.batch.fill(
            [tokens[i] for i in ids], [positions[i] for i in ids], ids, [True] * len(ids)
        )
        assert self.context.decode(self.batch) == 0
        rows = [self.context.logits(i).copy() for i in range(len(ids))]
        self.logits += rows
        return {seq_id: int(row.argmax()) for seq_id, row in zip(ids, rows, strict=True)}

    def close(self) -> None:
        self.context.close()
        self.batch.close()


def run(model: llama.Model, n_ubatch: int, n_decode: int = 64, n_threads: int = 1) -> Logits:
    """Return the logits of a prompt's batches and of n_decode greedy steps."""
    evaluation = Evaluation(model, n_ubatch, n_threads)
    evaluation.prefill(PROMPT)
    token = int(evaluation.logits[-1].argmax())
    for i in range(n_decode):
        token = evaluation.decode({0: len(PROMPT) + i}, {0: token})[0]
    evaluation.close()
    return np.array(evaluation.logits)


def run_several(model: llama.Model, n_ubatch: int) -> Logits:
    """Return the logits of three sequences that are prefilled and decoded in turns."""
    evaluation = Evaluation(model, n_ubatch)
    positions: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for seq_id, n_prompt in ((0, 20), (1, 70), (2, 5)):
        evaluation.prefill(PROMPT[seq_id : seq_id + n_prompt], seq_id)
        positions[seq_id] = n_prompt
        tokens[seq_id] = int(evaluation.logits[-1].argmax())
        for _ in range(4):
            tokens = evaluation.decode(positions, tokens)
            positions = {i: n + 1 for i, n in positions.items()}
    evaluation.close()
    return np.array(evaluation.logits)
