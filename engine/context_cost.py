"""What a context will take, asked of llama.cpp itself before any weight is loaded.

In: a model's header, and how it is loaded. Out: a ContextCost, which plans go by. For a process
that may load llama.cpp; takes as long as llama.cpp needs to read the header.
"""

from __future__ import annotations

import logging

import msgspec

from headrace.engine import llama
from headrace.engine.errors import EngineError
from headrace.engine.gguf import Header
from headrace.engine.kv_cache import n_sequence_ids
from headrace.engine.llama_log import ContextBytes
from headrace.engine.messages import ContextCost, Load

logger = logging.getLogger(__name__)

# Contexts are made with multiples of this.
_CELL_STEP = 256
# Beyond a batch, which fewer cells make shorter, sizes are straight lines: SmolLM2, Gemma 3 and the
# generated models, from 512 to 131,072 cells.
_FEWEST_CELLS = 512
_WIDTH = 16
# What llama.cpp notes about cells is real memory even when theirs is not.
_MOST_CELLS = 131_072


def with_context_cost(header: Header, load: Load) -> Load:
    """Return load with what llama.cpp says of its context.

    If it says nothing, load is returned as it is, and a warning tells why: sizes are estimated.
    """
    try:
        cost = ask_context_cost(header, load)
    except EngineError as error:
        logger.warning("the sizes of the context and its buffers are estimated: %s", error)
        return load
    return msgspec.structs.replace(load, context_cost=cost)


def ask_context_cost(header: Header, load: Load) -> ContextCost:
    """Return what contexts take for a model that is loaded as load says.

    Raises:
        EngineError: llama.cpp refuses the model, or does not say what was expected.
    """
    n_fewest = max(_padded(load.n_batch), _FEWEST_CELLS)
    n_most = load.n_slots * _padded(min(load.n_ctx, header.context_length or load.n_ctx))
    n_most = max(min(n_most, _MOST_CELLS), _WIDTH * n_fewest)
    model = llama.Model(header.path, simulates=True, metadata=_without_vocab(header))
    try:
        few, many = (_context_bytes(model, load, n_cells) for n_cells in (n_fewest, n_most))
    finally:
        model.close()
    n_cells = n_most - n_fewest
    kv_bytes_per_cell = (many.memory_bytes - few.memory_bytes) / n_cells
    mask_bytes_per_cell = (many.compute_bytes - few.compute_bytes) / n_cells
    return ContextCost(
        kv_type=load.kv_type,
        kv_bytes_per_cell=kv_bytes_per_cell,
        mask_bytes_per_cell=mask_bytes_per_cell,
        fixed_bytes=round(few.n_bytes - n_fewest * (kv_bytes_per_cell + mask_bytes_per_cell)),
    )


def _context_bytes(model: llama.Model, load: Load, n_cells: int) -> ContextBytes:
    context = llama.Context(
        model, n_cells=n_cells, n_seqs=n_sequence_ids(load.n_slots, can_cut=not model.is_recurrent),
        n_batch=load.n_batch, n_threads=load.n_threads, n_threads_batch=load.n_threads_batch,
        kv_type=load.kv_type,
    )  # fmt: skip
    context.close()
    if context.said_bytes is None:
        raise EngineError(
            "llama.cpp did not say what a context takes, expected lines of its KV cache, compute"
            " and output buffers in its log"
        )
    return context.said_bytes


def _without_vocab(header: Header) -> dict[str, int | str]:
    """Return metadata that saves llama.cpp the building of a vocabulary; only its length counts."""
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight":
            key = f"{header.architecture}.vocab_size"
            return {"tokenizer.ggml.model": "none", key: tensor.shape[1]}
    return {}


def _padded(n_cells: int) -> int:
    return -(-n_cells // _CELL_STEP) * _CELL_STEP
