"""What an engine process takes beside weights, their streaming, and the cells of the context.

In: a model's header and tensors, a Load. Out: Buffers. Pure; what only llama.cpp can say of a
context comes with the Load, and is estimated where it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.engine.gguf import Array, Header, Tensor
from headrace.engine.messages import Load
from headrace.engine.tensors import TensorTable

# Interpreter, libraries and what they allocate, for a model of no vocabulary on one thread.
_PROCESS_BYTES = 40 << 20
# Of each token and each merge: llama.cpp's tables of them, and the header as it was read. SmolLM2,
# Gemma 3 and a vocabulary like Qwen's: 165, 158 and 143. Asking what a context takes leaves some
# behind, too: of Gemma 3 another 54.
_VOCAB_ENTRY_BYTES = 224
# A sampler's candidates: llama.h, llama_token_data.
_CANDIDATE_BYTES = 12
# A stack, and the workspace of a kernel: ggml-cpu/tiled/tiled.cpp.
_THREAD_BYTES = 768 << 10
# llama.cpp's graphs and their allocator.
_GRAPH_BYTES = 8 << 20
# All of that together, where nothing was said of the context.
_COMPUTE_BASE_BYTES = 24 << 20
# Of an activation as the kernel of a weight wants it: ggml-cpu.c, vec_dot_type. All quantised types
# count as those that want Q8_K, the largest.
_WORK_BYTES = {"F32": 0.0, "F16": 2.0, "BF16": 2.0}
_QUANTISED_WORK_BYTES = 292 / 256
# Which row of which token an expert has: ggml-cpu.c, mmid_row_mapping.
ROW_BYTES = 8


@dataclass(frozen=True, slots=True)
class Buffers:
    """What is neither weights nor cells: in memory, and on a GPU if layers are there."""

    ram_bytes: int
    vram_bytes: int


def process_buffers(header: Header, table: TensorTable, load: Load) -> Buffers:
    """Return what a process takes that runs a model which is loaded as load says."""
    process_bytes = _process_bytes(header, load)
    estimate = estimated_bytes(header, table, load.n_batch, load.n_slots)
    cost = load.context_cost
    if cost is None:
        return Buffers(process_bytes + estimate, estimate)
    threads = max(load.n_threads, load.n_threads_batch) * _THREAD_BYTES
    work_bytes = _work_bytes(table, load.n_batch)
    ram_bytes = process_bytes + _GRAPH_BYTES + threads + cost.fixed_bytes + work_bytes
    # The cost was asked of the CPU, whose buffers are not all that a GPU's kernels take.
    return Buffers(ram_bytes, max(cost.fixed_bytes, estimate))


def _process_bytes(header: Header, load: Load) -> int:
    """Return what a process takes before there is a context: interpreter, vocabulary, samplers."""
    names = ("tokens", "merges")
    arrays = [header.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    n_tokens, n_merges = (a.n_elements if isinstance(a, Array) else 0 for a in arrays)
    vocab_bytes = (n_tokens + n_merges) * _VOCAB_ENTRY_BYTES
    return _PROCESS_BYTES + vocab_bytes + load.n_slots * n_tokens * _CANDIDATE_BYTES


def estimated_bytes(header: Header, table: TensorTable, n_batch: int, n_slots: int) -> int:
    """Return about what llama.cpp takes for the activations of one physical batch, and more."""
    n_embd = header.embedding_length
    widest = max((item.tensor.shape[1] for item in table.dense), default=0)
    if table.experts:
        inner = max(block.parts[-1].shape[0] for block in table.experts)
        widest = max(widest, table.n_used * (inner + n_embd))
    n_vocab = max((t.shape[1] for t in table.trunk if t.name == "token_embd.weight"), default=0)
    return _COMPUTE_BASE_BYTES + 4 * (n_batch * (8 * n_embd + 2 * widest) + n_slots * n_vocab)


def _work_bytes(table: TensorTable, n_batch: int) -> int:
    """Return what kernels take at their first use: tokens in their type, and whose rows they are.

    The rows of streamed experts are counted with their records, too.

    Source: ggml-cpu.c, ggml_graph_plan; the largest of all products.
    """
    weights = [*table.trunk, *(item.tensor for item in table.dense)]
    sizes = [tensor.shape[0] * _work_type_bytes(tensor) for tensor in weights]
    for block in table.experts:
        rows = block.n_experts * table.n_used * ROW_BYTES
        # The experts of a token share what goes into all of their weights but the last.
        *first, down = block.parts
        sizes += [part.shape[0] * _work_type_bytes(part) + rows for part in first]
        sizes.append(table.n_used * down.shape[0] * _work_type_bytes(down) + rows)
    return math.ceil(n_batch * max(sizes))


def _work_type_bytes(tensor: Tensor) -> float:
    return _WORK_BYTES.get(tensor.type_name, _QUANTISED_WORK_BYTES)
