"""Small GGUF models with random weights, of every shape that streaming treats differently.

In: a folder. Out: paths of model files in it. The weights are random but fixed by a seed; logits of
such a model depend on every weight, so that one wrong byte shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q
from gguf import GGUFReader, GGUFValueType, GGUFWriter, quants

N_VOCAB = 320
# ggml-common.h: bytes of a block, where its scales are, about the deviation of its values.
_RANDOM_BLOCKS = {Q.Q4_K: (144, (0, 2), 300.0), Q.Q6_K: (210, (208,), 1400.0)}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to build; n_expert 0 is dense."""

    arch: str = "llama"
    n_layer: int = 6
    n_embd: int = 256
    n_ff: int = 512
    n_head: int = 4
    n_head_kv: int = 2
    n_expert: int = 0
    n_used: int = 0
    types: tuple[Q, ...] = (Q.Q4_0,)
    """Of the feed-forward tensors, in turn, by layer."""
    has_expert_biases: bool = False
    split_max_tensors: int = 0
    alignment: int = 32
    seed: int = 1
    extra: dict[str, float] = field(default_factory=dict)


DENSE = Shape()
MIXED_DENSE = replace(DENSE, types=(Q.Q4_0, Q.Q8_0, Q.F16), n_layer=7)
MIXTRAL = Shape(n_expert=8, n_used=2, n_layer=4, n_ff=448)
QWEN3MOE = Shape(arch="qwen3moe", n_expert=48, n_used=6, n_layer=5, n_ff=96)
ALIGNED_MOE = Shape(arch="qwen3moe", n_expert=16, n_used=4, n_layer=4, n_embd=512, n_ff=256)
MIXED_MOE = replace(QWEN3MOE, types=(Q.Q4_0, Q.Q8_0, Q.Q4_0), n_layer=6)
BIASED_MOE = Shape(
    arch="gpt-oss", n_expert=16, n_used=4, n_layer=4, n_ff=160, has_expert_biases=True
)
PADDED_MOE = replace(QWEN3MOE, alignment=64)
SPLIT_MOE = replace(QWEN3MOE, split_max_tensors=26)
K_DENSE = replace(DENSE, types=(Q.Q4_K, Q.Q6_K))
K_MOE = Shape(arch="qwen3moe", n_expert=16, n_used=4, n_layer=4, n_ff=256, types=(Q.Q4_K, Q.Q6_K))
SPLIT_DENSE = replace(DENSE, split_max_tensors=20)

SHAPES = {
    "dense": DENSE, "mixed_dense": MIXED_DENSE, "k_dense": K_DENSE, "split_dense": SPLIT_DENSE,
    "mixtral": MIXTRAL, "qwen3moe": QWEN3MOE, "aligned_moe": ALIGNED_MOE, "mixed_moe": MIXED_MOE,
    "k_moe": K_MOE, "biased_moe": BIASED_MOE, "padded_moe": PADDED_MOE, "split_moe": SPLIT_MOE,
}  # fmt: skip


class _Builder:
    """Writes the tensors of one shape."""

    def __init__(self, shape: Shape, path: Path) -> None:
        self.shape = shape
        self.random = np.random.default_rng(shape.seed)
        self.writer = GGUFWriter(path, shape.arch, split_max_tensors=shape.split_max_tensors)
        if shape.alignment != 32:
            self.writer.add_custom_alignment(shape.alignment)

    def tensor(self, name: str, dims: tuple[int, ...], kind: Q = Q.F32, scale: float = 0.0) -> None:
        """Add a random tensor; dims are numpy's, rows last. Norms (scale < 0) are near one."""
        values = self.random.standard_normal(dims, dtype=np.float32)
        values *= np.float32(0.1 if scale < 0 else scale or dims[-1] ** -0.5)
        if scale < 0:
            values += 1
        if kind == Q.F32:
            self.writer.add_tensor(name, values)
        elif kind in _RANDOM_BLOCKS:
            self.writer.add_tensor(name, self.blocks(dims, kind), raw_dtype=kind)
        else:
            self.writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)

    def blocks(self, dims: tuple[int, ...], kind: Q) -> npt.NDArray[np.uint8]:
        """Return random blocks of a type that gguf can't quantise to."""
        n_bytes, scales, std = _RANDOM_BLOCKS[kind]
        n_blocks = dims[-1] // 256
        data = self.random.integers(0, 256, (*dims[:-1], n_blocks, n_bytes), dtype=np.uint8)
        scale = np.array([dims[-1] ** -0.5 / std], dtype=np.float16).view(np.uint8)
        for start in scales:
            data[..., start : start + 2] = scale
        return data.reshape(*dims[:-1], n_blocks * n_bytes)

    def metadata(self) -> None:
        s, w = self.shape, self.writer
        w.add_block_count(s.n_layer)
        w.add_context_length(4096)
        w.add_embedding_length(s.n_embd)
        w.add_feed_forward_length(s.n_ff)
        w.add_head_count(s.n_head)
        w.add_head_count_kv(s.n_head_kv)
        w.add_key_length(s.n_embd // s.n_head)
        w.add_value_length(s.n_embd // s.n_head)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_dimension_count(s.n_embd // s.n_head)
        w.add_rope_freq_base(10000.0)
        w.add_vocab_size(N_VOCAB)
        if s.n_expert:
            w.add_expert_count(s.n_expert)
            w.add_expert_used_count(s.n_used)
            w.add_expert_feed_forward_length(s.n_ff)
        if s.arch == "gpt-oss":
            w.add_sliding_window(128)
        self.vocabulary()

    def vocabulary(self) -> None:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
        tokens += [f"▁w{i}" for i in range(N_VOCAB - len(tokens))]
        types = [2, 3, 3] + [6] * 256 + [1] * (N_VOCAB - 259)
        self.writer.add_tokenizer_model("llama")
        self.writer.add_token_list(tokens)
        self.writer.add_token_scores([float(-i) for i in range(N_VOCAB)])
        self.writer.add_token_types(types)
        self.writer.add_bos_token_id(1)
        self.writer.add_eos_token_id(2)

    def attention(self, prefix: str) -> None:
        s = self.shape
        n_kv = s.n_embd // s.n_head * s.n_head_kv
        self.tensor(f"{prefix}attn_norm.weight", (s.n_embd,), scale=-1)
        for name, n_rows in (("q", s.n_embd), ("k", n_kv), ("v", n_kv), ("output", s.n_embd)):
            self.tensor(f"{prefix}attn_{name}.weight", (n_rows, s.n_embd), Q.Q8_0)
            if s.arch == "gpt-oss":
                self.tensor(f"{prefix}attn_{name}.bias", (n_rows,))
        if s.arch == "qwen3moe":
            for name in ("q", "k"):
                self.tensor(f"{prefix}attn_{name}_norm.weight", (s.n_embd // s.n_head,), scale=-1)
        if s.arch == "gpt-oss":
            self.tensor(f"{prefix}attn_sinks.weight", (s.n_head,))
        norm = "post_attention_norm" if s.arch == "gpt-oss" else "ffn_norm"
        self.tensor(f"{prefix}{norm}.weight", (s.n_embd,), scale=-1)

    def feed_forward(self, prefix: str, kind: Q) -> None:
        s = self.shape
        e: tuple[int, ...] = (s.n_expert,) if s.n_expert else ()
        suffix = "_exps" if e else ""
        if e:
            self.tensor(f"{prefix}ffn_gate_inp.weight", (s.n_expert, s.n_embd), scale=0.2)
            if s.has_expert_biases:
                self.tensor(f"{prefix}ffn_gate_inp.bias", e)
        for name, rows, columns in (
            ("gate", s.n_ff, s.n_embd), ("down", s.n_embd, s.n_ff), ("up", s.n_ff, s.n_embd)
        ):  # fmt: skip
            self.tensor(f"{prefix}ffn_{name}{suffix}.weight", (*e, rows, columns), kind)
            if s.has_expert_biases:
                self.tensor(f"{prefix}ffn_{name}{suffix}.bias", (*e, rows), scale=0.1)

    def build(self) -> None:
        s = self.shape
        self.metadata()
        self.tensor("token_embd.weight", (N_VOCAB, s.n_embd), Q.Q8_0, scale=1.0)
        for i in range(s.n_layer):
            self.attention(f"blk.{i}.")
            self.feed_forward(f"blk.{i}.", s.types[i % len(s.types)])
        self.tensor("output_norm.weight", (s.n_embd,), scale=-1)
        self.tensor("output.weight", (N_VOCAB, s.n_embd), Q.Q8_0)
        finish(self.writer)


def finish(writer: GGUFWriter) -> None:
    """Write what was added and close the files."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(shape: Shape, folder: Path, name: str = "model") -> Path:
    """Build shape in folder and return the path of its (first) file."""
    path = folder / f"{name}.gguf"
    _Builder(shape, path).build()
    if path.exists():
        return path
    return next(iter(sorted(folder.glob(f"{name}-00001-of-*.gguf"))))


def build_copied_experts(dense: Path, path: Path, n_expert: int, n_used: int) -> None:
    """Write a MoE whose every expert is the feed-forward block of a dense llama model.

    The weights of the chosen experts sum to one, so its answers are the dense model's.
    """
    reader = GGUFReader(dense)
    writer = GGUFWriter(path, "llama")
    for name, item in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = item.types[1] if item.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, item.contents(), item.types[0], sub_type=sub_type)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(n_used)
    random = np.random.default_rng(3)
    for tensor in reader.tensors:
        name = tensor.name
        if ".ffn_" in name and not name.endswith("norm.weight"):
            data = np.broadcast_to(tensor.data, (n_expert, *tensor.data.shape)).copy()
            head, suffix = name.rsplit(".", 1)
            writer.add_tensor(f"{head}_exps.{suffix}", data, raw_dtype=tensor.tensor_type)
            if name.endswith("ffn_gate.weight"):
                n_embd = int(tensor.shape[0])
                router = random.standard_normal((n_expert, n_embd), dtype=np.float32) * 0.1
                writer.add_tensor(f"{head}_inp.weight", router)
        else:
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)
