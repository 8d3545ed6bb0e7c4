"""Generated models larger than the memory that the benchmarks give them; text in, garbage out.

In: a folder. Out: paths of GGUF files in it, kept for the next time. Weights are random blocks of
Q4_0, the tokenizer is SmolLM2's, so that English text gives real token sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from reporting import smollm2

_BLOCK, _BLOCK_BYTES = 32, 18
# Nibbles are 1 to 15, which stand for -7 to 7: with a mean that is not 0, products with them would
# point the same way for every token, and all tokens would choose the same experts.
_NIBBLE_STD = 4.32


@dataclass(frozen=True, slots=True)
class BigShape:
    """Sizes of a generated model; n_expert 0 is dense."""

    name: str
    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_head_dim: int
    n_expert: int = 0
    n_used: int = 0


# As Qwen3-30B-A3B with half its layers, and as Llama 3 8B.
MOE = BigShape("moe", "qwen3moe", 24, 2048, 768, 32, 4, 128, 128, 8)
DENSE = BigShape("dense", "llama", 32, 4096, 14336, 32, 8, 128)


class _Blocks:
    """Random Q4_0 data: any length, cut from one pool of bytes."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(7)
        nibbles = self._random.integers(1, 16, (2, 1 << 21, _BLOCK_BYTES), dtype=np.uint8)
        self._blocks: npt.NDArray[np.uint8] = nibbles[0] | nibbles[1] << 4
        # On x86 ggml looks scales up in a table: with one for all blocks, decode was a quarter
        # faster than that of real weights.
        self._factors = self._random.uniform(0.75, 1.25, len(self._blocks)).astype(np.float32)

    def matrix(self, shape: tuple[int, ...], row_norm: float) -> npt.NDArray[np.uint8]:
        """Return a matrix whose rows have about that norm; shape is numpy's."""
        n_blocks = int(np.prod(shape)) // _BLOCK
        start = int(self._random.integers(0, len(self._blocks)))
        data = np.resize(np.roll(self._blocks, -start, axis=0), (n_blocks, _BLOCK_BYTES))
        scale = row_norm * shape[-1] ** -0.5 / _NIBBLE_STD
        scales = (scale * np.resize(self._factors, n_blocks)).astype(np.float16)
        data[:, :2] = scales.view(np.uint8).reshape(-1, 2)
        return data.reshape(*shape[:-1], shape[-1] // _BLOCK * _BLOCK_BYTES)


def build_big(shape: BigShape, folder: Path) -> Path:
    """Return the path of the model of shape in folder, made if it is not there."""
    path = folder / f"{shape.name}-{shape.n_layer}.gguf"
    if path.exists():
        return path
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(partial, shape.arch)
    _add_metadata(writer, shape)
    tensors = list(_tensors(shape))
    for name, dims, kind in tensors:
        if kind == Q.F32:
            writer.add_tensor_info(name, dims, np.dtype(np.float32), int(np.prod(dims)) * 4)
        else:
            n_bytes = int(np.prod(dims)) // _BLOCK * _BLOCK_BYTES
            rows = (*dims[:-1], dims[-1] // _BLOCK * _BLOCK_BYTES)
            writer.add_tensor_info(name, rows, np.dtype(np.uint8), n_bytes, raw_dtype=Q.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks, random = _Blocks(), np.random.default_rng(8)
    for name, dims, kind in tensors:
        if kind == Q.Q4_0:
            writer.write_tensor_data(blocks.matrix(dims, _row_norm(name, dims)))
        elif name.endswith("norm.weight"):
            writer.write_tensor_data(np.ones(dims, dtype=np.float32))
        else:
            values = random.standard_normal(dims, dtype=np.float32) * dims[-1] ** -0.5
            writer.write_tensor_data(values)
    writer.close()
    partial.rename(path)
    return path


def _row_norm(name: str, dims: tuple[int, ...]) -> float:
    """Return the norm of a tensor's rows: what a token is must outweigh what it attends to.

    Else all tokens of a text would choose the same experts.
    """
    if name == "token_embd.weight":
        return float(0.3 * dims[-1] ** 0.5)
    return 0.3 if name.endswith("attn_output.weight") else 1.0


def _add_metadata(writer: GGUFWriter, s: BigShape) -> None:
    writer.add_block_count(s.n_layer)
    writer.add_context_length(4096)
    writer.add_embedding_length(s.n_embd)
    writer.add_feed_forward_length(s.n_ff)
    writer.add_head_count(s.n_head)
    writer.add_head_count_kv(s.n_head_kv)
    writer.add_key_length(s.n_head_dim)
    writer.add_value_length(s.n_head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(s.n_head_dim)
    writer.add_rope_freq_base(10000.0)
    if s.n_expert:
        writer.add_expert_count(s.n_expert)
        writer.add_expert_used_count(s.n_used)
        writer.add_expert_feed_forward_length(s.n_ff)
    for name, item in GGUFReader(smollm2()).fields.items():
        if name.startswith("tokenizer."):
            sub_type = item.types[1] if item.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, item.contents(), item.types[0], sub_type=sub_type)


def _tensors(s: BigShape) -> list[tuple[str, tuple[int, ...], Q]]:
    n_vocab = 49152  # SmolLM2's
    q, kv = s.n_head * s.n_head_dim, s.n_head_kv * s.n_head_dim
    experts = (s.n_expert,) if s.n_expert else ()
    suffix = "_exps" if s.n_expert else ""
    found: list[tuple[str, tuple[int, ...], Q]] = [
        ("token_embd.weight", (n_vocab, s.n_embd), Q.Q4_0)
    ]
    for i in range(s.n_layer):
        block: list[tuple[str, tuple[int, ...], Q]] = [
            ("attn_norm.weight", (s.n_embd,), Q.F32),
            ("attn_q.weight", (q, s.n_embd), Q.Q4_0),
            ("attn_k.weight", (kv, s.n_embd), Q.Q4_0),
            ("attn_v.weight", (kv, s.n_embd), Q.Q4_0),
            ("attn_output.weight", (s.n_embd, q), Q.Q4_0),
            ("ffn_norm.weight", (s.n_embd,), Q.F32),
        ]
        if s.arch == "qwen3moe":
            block += [(f"attn_{x}_norm.weight", (s.n_head_dim,), Q.F32) for x in "qk"]
        if s.n_expert:
            block.append(("ffn_gate_inp.weight", (s.n_expert, s.n_embd), Q.F32))
        block += [
            (f"ffn_gate{suffix}.weight", (*experts, s.n_ff, s.n_embd), Q.Q4_0),
            (f"ffn_up{suffix}.weight", (*experts, s.n_ff, s.n_embd), Q.Q4_0),
            (f"ffn_down{suffix}.weight", (*experts, s.n_embd, s.n_ff), Q.Q4_0),
        ]
        found += [(f"blk.{i}.{name}", dims, kind) for name, dims, kind in block]
    found += [("output_norm.weight", (s.n_embd,), Q.F32)]
    found += [("output.weight", (n_vocab, s.n_embd), Q.Q4_0)]
    return found
