"""How many cells and slots a context gets, and what they take.

In: a model's header, a Load, memory. Out: bytes, a ContextPlan. Pure; knows nothing of
where weights are.
"""

from __future__ import annotations

import math

from headrace.engine.gguf import Array, Header
from headrace.engine.messages import Load
from headrace.engine.plan import ContextPlan

# Bytes of one element of the KV cache: block bytes / block elements of the ggml types.
KV_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip

MIN_CTX = 256
# Full contexts that may be parked outside the cells.
N_PARKED = 4
# What a cell costs beside its vectors, once it is used: llama-kv-cells.h, for two caches.
_CELL_NOTES_BYTES = 2 * 160


def cell_bytes(header: Header, load: Load, first_gpu_layer: int) -> tuple[int, int]:
    """Return the bytes of one cell in memory and on the GPU, which has the layers from first on.

    As llama.cpp says, if load has that; it names no layers, which then have the shares that the
    header gives them.
    """
    in_ram = kv_bytes_per_cell(header, load.kv_type, slice(None, first_gpu_layer))
    in_vram = kv_bytes_per_cell(header, load.kv_type, slice(first_gpu_layer, None))
    cost = load.context_cost
    if cost is None:
        return in_ram, in_vram
    kv_bytes = cost.kv_bytes_per_cell * KV_BYTES[load.kv_type] / KV_BYTES[cost.kv_type]
    share = in_vram / max(in_ram + in_vram, 1)
    # Both have the masks of a batch.
    in_ram = math.ceil((1 - share) * kv_bytes + cost.mask_bytes_per_cell + _CELL_NOTES_BYTES)
    return in_ram, math.ceil(share * kv_bytes + cost.mask_bytes_per_cell) if in_vram else 0


def kv_bytes_per_cell(header: Header, kv_type: str, layers: slice = slice(None)) -> int:
    """Return the bytes that one token takes in the KV cache, all of these layers together.

    Layers without attention count 0 heads in the header; models with other caches (latent
    attention) are overestimated, never underestimated.
    """
    arch = header.architecture
    n_heads = _per_layer(header, "attention.head_count")
    n_kv_heads = _per_layer(header, "attention.head_count_kv") or n_heads
    n_embd_head = header.embedding_length // max(max(n_heads, default=1), 1)
    n_k = header.get_int(f"{arch}.attention.key_length", n_embd_head)
    n_v = header.get_int(f"{arch}.attention.value_length", n_embd_head)
    return int(sum(n_kv_heads[layers]) * (n_k + n_v) * KV_BYTES[kv_type])


def _per_layer(header: Header, key: str) -> list[int]:
    """Return the value of an architecture key for each layer; it may be one number or an array."""
    value = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(value, Array):
        return [int(v) for v in value.values()]
    return [value] * header.block_count if isinstance(value, int) else []


def plan_context(
    n_ctx: int, n_slots: int, *, n_ctx_train: int, bytes_per_cell: int, budget_bytes: int,
    vram_bytes_per_cell: int = 0, vram_budget_bytes: int = 0, widens: bool = True,
) -> ContextPlan:  # fmt: skip
    """Return the context for n_slots sequences of n_ctx tokens within both budgets.

    The context is bounded by what the model was trained for. When memory is short, the sequences
    share fewer cells first (they seldom are full all at once), then each gets a shorter context.
    widens is false for models whose rope factors depend on the number of cells.
    """
    n_ctx = max(min(n_ctx, n_ctx_train) if n_ctx_train > 0 else n_ctx, 4)
    n_fit = budget_bytes // max(bytes_per_cell, 1)
    if vram_bytes_per_cell:
        n_fit = min(n_fit, vram_budget_bytes // vram_bytes_per_cell)
    n_fit = max(n_fit // 256 * 256, MIN_CTX)  # llama.cpp takes multiples only
    n_ctx = min(n_ctx, n_fit)
    # Cells beyond the first sequence's take at most half of the memory.
    n_cells = min(n_ctx * n_slots, max(n_ctx, n_fit // 2)) if widens else n_ctx
    n_cells = -(-n_cells // 256) * 256
    n_bytes = n_cells * bytes_per_cell
    # Half of what is left, and no more than what the cells can hold.
    parked_bytes = N_PARKED * n_ctx * (bytes_per_cell + vram_bytes_per_cell)
    parking_bytes = max(min((budget_bytes - n_bytes) // 2, parked_bytes), 0)
    return ContextPlan(n_ctx, n_cells, n_bytes, parking_bytes, n_cells * vram_bytes_per_cell)


def widens(header: Header) -> bool:
    """Tell whether more cells than one sequence's leave the model's numbers as they are.

    With two sets of rope factors llama.cpp chooses one by the number of cells.
    """
    return not any("rope_factors_long" in tensor.name for tensor in header.tensors)
