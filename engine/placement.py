"""Plans, as pure functions: how many cells and slots a context gets, and how a model is loaded.

In: a model's header, the machine's figures, settings. Out: values. No I/O, no llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.gguf import Array, Header
from headrace.engine.messages import Load

if TYPE_CHECKING:
    from headrace.config.settings import Settings
    from headrace.engine.hardware import Topology
    from headrace.engine.library import Model

# Bytes of one element of the KV cache: block bytes / block elements of the ggml types.
KV_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip

DEFAULT_SLOTS = 4
# Memory left to others: compute buffers, the interpreter, the rest of the machine.
HEADROOM_BYTES = 512 << 20
MIN_CTX = 256
# Full contexts that may be parked outside the cells.
N_PARKED = 4
# Tokens of one forward pass; llama.cpp's own default.
N_BATCH = 512


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """A context: tokens each sequence may have, and cells that all sequences share."""

    n_ctx: int
    n_cells: int
    n_bytes: int
    parking_bytes: int = 1 << 30
    """Memory for prefixes that are kept outside the cells."""


def kv_bytes_per_cell(header: Header, kv_type: str) -> int:
    """Return the bytes that one token takes in the KV cache, all layers together.

    Layers without attention count 0 heads in the header; models with other caches (latent
    attention) are overestimated, never underestimated.
    """
    arch = header.architecture
    n_heads = _per_layer(header, "attention.head_count")
    n_kv_heads = _per_layer(header, "attention.head_count_kv") or n_heads
    n_embd_head = header.embedding_length // max(max(n_heads, default=1), 1)
    n_k = header.get_int(f"{arch}.attention.key_length", n_embd_head)
    n_v = header.get_int(f"{arch}.attention.value_length", n_embd_head)
    return int(sum(n_kv_heads) * (n_k + n_v) * KV_BYTES[kv_type])


def _per_layer(header: Header, key: str) -> list[int]:
    """Return the value of an architecture key for each layer; it may be one number or an array."""
    value = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(value, Array):
        return [int(v) for v in value.values()]
    return [value] * header.block_count if isinstance(value, int) else []


def plan_context(
    n_ctx: int, n_slots: int, *, n_ctx_train: int, bytes_per_cell: int, budget_bytes: int,
    widens: bool = True,
) -> ContextPlan:  # fmt: skip
    """Return the context for n_slots sequences of n_ctx tokens within budget_bytes.

    The context is bounded by what the model was trained for. When memory is short, the sequences
    share fewer cells first (they seldom are full all at once), then each gets a shorter context.
    widens is false for models whose rope factors depend on the number of cells.
    """
    n_ctx = max(min(n_ctx, n_ctx_train) if n_ctx_train > 0 else n_ctx, 4)
    n_fit = max(budget_bytes // max(bytes_per_cell, 1), MIN_CTX)
    n_ctx = min(n_ctx, n_fit)
    # Cells beyond the first sequence's take at most half of the memory.
    n_cells = min(n_ctx * n_slots, max(n_ctx, n_fit // 2)) if widens else n_ctx
    n_cells = -(-n_cells // 256) * 256  # llama.cpp rounds up to this
    n_bytes = n_cells * bytes_per_cell
    # Half of what is left, and no more than what the cells can hold.
    parking_bytes = max(min((budget_bytes - n_bytes) // 2, N_PARKED * n_ctx * bytes_per_cell), 0)
    return ContextPlan(n_ctx, n_cells, n_bytes, parking_bytes)


def plan_load(model: Model, settings: Settings, topology: Topology) -> Load:
    """Return how model is loaded on this machine."""
    n_threads = settings.threads or topology.default_threads
    efficiency = tuple(sorted(topology.efficiency_cpus))
    return Load(
        path=str(model.path),
        name=str(model.name),
        n_ctx=settings.context,
        n_slots=settings.parallel or DEFAULT_SLOTS,
        n_batch=N_BATCH,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        # Pinned only where slow cores would otherwise take part in every matrix product.
        decode_cpus=tuple(sorted(topology.physical_performance_cpus)) if efficiency else (),
        io_cpus=efficiency,
        kv_type=settings.kv_cache_type,
        log_level=settings.log_level,
    )
