"""Published models as GGUF files of which only the header is there.

In: a folder. Out: paths of files in it with the true names, shapes, types and sizes of all tensors.
The data is a hole: a file of 40 GB takes some kilobytes of disk. The vocabulary is a stand-in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Q

Row = tuple[str, tuple[int, ...], Q]
"""Name, shape in GGUF's order (the row first), type."""


@dataclass(frozen=True, slots=True)
class Published:
    """A model as it was published: sizes of the config, types of the quantised file."""

    name: str
    arch: str
    n_layer: int
    n_embd: int
    n_vocab: int
    context: int
    metadata: dict[str, int]
    """Keys of the architecture."""
    layer: Callable[[Published, int], list[Row]]
    """Tensors of block i, without the prefix."""
    ends: tuple[Q, Q]
    """Types of token_embd and output."""
    split_bytes: int = 0

    def rows(self) -> Iterator[Row]:
        yield "token_embd.weight", (self.n_embd, self.n_vocab), self.ends[0]
        for i in range(self.n_layer):
            for name, shape, kind in self.layer(self, i):
                yield f"blk.{i}.{name}", shape, kind
        yield "output_norm.weight", (self.n_embd,), Q.F32
        yield "output.weight", (self.n_embd, self.n_vocab), self.ends[1]

    def more(self, i: int, base: Q = Q.Q4_K) -> Q:
        """Return what Q4_K_M gives to a layer's most sensitive tensors: Q6_K in every third.

        Source: llama.cpp, llama-quant.cpp, use_more_bits.
        """
        n = self.n_layer
        takes_more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        return Q.Q6_K if takes_more else base


def build(model: Published, folder: Path, n_tokens: int = 8) -> Path:
    """Write the header of model into folder; return the path of its first file."""
    path = folder / f"{model.name}.gguf"
    writer = GGUFWriter(path, model.arch, split_max_size=model.split_bytes)
    writer.add_name(model.name)
    writer.add_block_count(model.n_layer)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.n_embd)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in model.metadata.items():
        writer.add_uint32(f"{model.arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(n_tokens)])
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    for name, shape, kind in model.rows():
        dims = tuple(reversed(shape))
        writer.add_tensor_info(name, dims, np.dtype(np.float32), n_bytes(shape, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    files, parts = writer.fout, writer.tensors
    assert files is not None
    for file, tensors in zip(files, parts, strict=True):
        pad = writer.ggml_pad
        data = sum(pad(info.nbytes, writer.data_alignment) for info in tensors.values())
        file.truncate(pad(file.tell(), writer.data_alignment) + data)
    n_files = len(files)
    writer.close()
    return path if n_files == 1 else folder / f"{model.name}-00001-of-{n_files:05d}.gguf"


def n_bytes(shape: tuple[int, ...], kind: Q) -> int:
    """Return the bytes of a tensor."""
    n_elements, block_bytes = GGML_QUANT_SIZES[kind]
    return int(math.prod(shape) // n_elements * block_bytes)


def _heads(n_head: int, n_head_kv: int, n_head_dim: int) -> dict[str, int]:
    return {
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": n_head_dim,
        "attention.value_length": n_head_dim,
    }


def _attention(model: Published, types: tuple[Q, Q, Q, Q]) -> list[Row]:
    """Return norm, q, k, v and output with those types."""
    n, heads = model.n_embd, model.metadata
    q = heads["attention.head_count"] * heads["attention.key_length"]
    kv = heads["attention.head_count_kv"] * heads["attention.key_length"]
    return [
        ("attn_norm.weight", (n,), Q.F32),
        ("attn_q.weight", (n, q), types[0]),
        ("attn_k.weight", (n, kv), types[1]),
        ("attn_v.weight", (n, kv), types[2]),
        ("attn_output.weight", (q, n), types[3]),
    ]


def _experts(model: Published, types: tuple[Q, Q, Q]) -> list[Row]:
    """Return the router and gate, up and down of all experts."""
    n, n_experts = model.n_embd, model.metadata["expert_count"]
    n_ff = model.metadata["expert_feed_forward_length"]
    return [
        ("ffn_gate_inp.weight", (n, n_experts), Q.F32),
        ("ffn_gate_exps.weight", (n, n_ff, n_experts), types[0]),
        ("ffn_up_exps.weight", (n, n_ff, n_experts), types[1]),
        ("ffn_down_exps.weight", (n_ff, n, n_experts), types[2]),
    ]


def _llama_layer(model: Published, i: int) -> list[Row]:
    n, n_ff = model.n_embd, model.metadata["feed_forward_length"]
    return [
        # llama-quant.cpp: the 70B's v is shared by 8 heads, and gets more bits.
        *_attention(model, (Q.Q4_K, Q.Q4_K, model.more(i, Q.Q5_K), Q.Q4_K)),
        ("ffn_norm.weight", (n,), Q.F32),
        ("ffn_gate.weight", (n, n_ff), Q.Q4_K),
        ("ffn_up.weight", (n, n_ff), Q.Q4_K),
        ("ffn_down.weight", (n_ff, n), model.more(i)),
    ]


def _mixtral_layer(model: Published, i: int) -> list[Row]:
    return [
        # llama-quant.cpp: with 8 experts attention is a small part, and gets more bits.
        *_attention(model, (Q.Q4_K, Q.Q8_0, Q.Q8_0, Q.Q5_K)),
        ("ffn_norm.weight", (model.n_embd,), Q.F32),
        *_experts(model, (Q.Q4_K, Q.Q4_K, model.more(i))),
    ]


def _qwen3moe_layer(model: Published, i: int) -> list[Row]:
    return [
        *_attention(model, (Q.Q4_K, Q.Q4_K, model.more(i), Q.Q4_K)),
        ("attn_q_norm.weight", (model.metadata["attention.key_length"],), Q.F32),
        ("attn_k_norm.weight", (model.metadata["attention.key_length"],), Q.F32),
        ("ffn_norm.weight", (model.n_embd,), Q.F32),
        *_experts(model, (Q.Q4_K, Q.Q4_K, model.more(i))),
    ]


def _gpt_oss_layer(model: Published, i: int) -> list[Row]:
    n, n_experts = model.n_embd, model.metadata["expert_count"]
    n_ff = model.metadata["expert_feed_forward_length"]
    attention = _attention(model, (Q.Q8_0, Q.Q8_0, Q.Q8_0, Q.Q8_0))
    biases = [
        (name.replace(".weight", ".bias"), shape[1:], Q.F32)
        for name, shape, _ in attention
        if len(shape) == 2
    ]
    return [
        *attention,
        *biases,
        ("attn_sinks.weight", (model.metadata["attention.head_count"],), Q.F32),
        ("post_attention_norm.weight", (n,), Q.F32),
        *_experts(model, (Q.MXFP4, Q.MXFP4, Q.MXFP4)),
        ("ffn_gate_inp.bias", (n_experts,), Q.F32),
        ("ffn_gate_exps.bias", (n_ff, n_experts), Q.F32),
        ("ffn_up_exps.bias", (n_ff, n_experts), Q.F32),
        ("ffn_down_exps.bias", (n, n_experts), Q.F32),
    ]


def _deepseek_layer(model: Published, i: int) -> list[Row]:
    n, m = model.n_embd, model.metadata
    n_head, q_rank, kv_rank = m["attention.head_count"], 1536, 512
    n_rope, n_nope, n_value = 64, 128, 128
    rows: list[Row] = [
        ("attn_norm.weight", (n,), Q.F32),
        ("attn_q_a.weight", (n, q_rank), Q.Q4_K),
        ("attn_q_a_norm.weight", (q_rank,), Q.F32),
        ("attn_q_b.weight", (q_rank, n_head * (n_nope + n_rope)), Q.Q4_K),
        ("attn_kv_a_mqa.weight", (n, kv_rank + n_rope), Q.Q4_K),
        ("attn_kv_a_norm.weight", (kv_rank,), Q.F32),
        # Rows of 128 are no multiple of a K-quant's block.
        ("attn_k_b.weight", (n_nope, kv_rank, n_head), Q.Q5_0),
        ("attn_v_b.weight", (kv_rank, n_value, n_head), Q.Q4_K),
        ("attn_output.weight", (n_head * n_value, n), Q.Q4_K),
        ("ffn_norm.weight", (n,), Q.F32),
    ]
    if i < m["leading_dense_block_count"]:
        n_ff = m["feed_forward_length"]
        rows += [
            ("ffn_gate.weight", (n, n_ff), Q.Q4_K),
            ("ffn_up.weight", (n, n_ff), Q.Q4_K),
            ("ffn_down.weight", (n_ff, n), model.more(i)),
        ]
        return rows
    n_ff = m["expert_feed_forward_length"]
    return [
        *rows,
        *_experts(model, (Q.Q4_K, Q.Q4_K, model.more(i))),
        ("exp_probs_b.bias", (m["expert_count"],), Q.F32),
        ("ffn_gate_shexp.weight", (n, n_ff), Q.Q4_K),
        ("ffn_up_shexp.weight", (n, n_ff), Q.Q4_K),
        ("ffn_down_shexp.weight", (n_ff, n), model.more(i)),
    ]


LLAMA_70B = Published(
    "Llama-3-70B-Q4_K_M", "llama", 80, 8192, 128256, 8192,
    {"feed_forward_length": 28672, **_heads(64, 8, 128)},
    _llama_layer, (Q.Q4_K, Q.Q6_K),
)  # fmt: skip
MIXTRAL = Published(
    "Mixtral-8x7B-Q4_K_M", "llama", 32, 4096, 32000, 32768,
    {
        "feed_forward_length": 14336, "expert_feed_forward_length": 14336,
        "expert_count": 8, "expert_used_count": 2, **_heads(32, 8, 128),
    },
    _mixtral_layer, (Q.Q4_K, Q.Q6_K),
)  # fmt: skip
QWEN3_30B = Published(
    "Qwen3-30B-A3B-Q4_K_M", "qwen3moe", 48, 2048, 151936, 40960,
    {
        "feed_forward_length": 6144, "expert_feed_forward_length": 768,
        "expert_count": 128, "expert_used_count": 8, **_heads(32, 4, 128),
    },
    _qwen3moe_layer, (Q.Q4_K, Q.Q6_K),
)  # fmt: skip
GPT_OSS_120B = Published(
    "gpt-oss-120b-MXFP4", "gpt-oss", 36, 2880, 201088, 131072,
    {
        "feed_forward_length": 2880, "expert_feed_forward_length": 2880,
        "expert_count": 128, "expert_used_count": 4, **_heads(64, 8, 64),
        "attention.sliding_window": 128,
    },
    _gpt_oss_layer, (Q.Q8_0, Q.Q8_0),
)  # fmt: skip
DEEPSEEK_V3 = Published(
    "DeepSeek-V3-Q4_K_M", "deepseek2", 61, 7168, 129280, 163840,
    {
        "feed_forward_length": 18432, "expert_feed_forward_length": 2048,
        "expert_count": 256, "expert_used_count": 8, "expert_shared_count": 1,
        "leading_dense_block_count": 3, "attention.q_lora_rank": 1536,
        "attention.kv_lora_rank": 512, "attention.key_length_mla": 192,
        "attention.value_length_mla": 128, "attention.head_count": 128,
        "attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
        "rope.dimension_count": 64,
    },
    _deepseek_layer, (Q.Q4_K, Q.Q6_K), split_bytes=48_000_000_000,
)  # fmt: skip
MODELS = (LLAMA_70B, MIXTRAL, QWEN3_30B, GPT_OSS_120B, DEEPSEEK_V3)
