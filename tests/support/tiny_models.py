"""GGUF files of a few hundred KiB with random weights that llama.cpp runs: what it computes is
noise, but always the same noise, and it depends on every token of the prompt.

Weights are float32, so that another order of summation moves a logit by 1e-6 and not, as with
quantised activations, by 0.1: greedy answers can be compared between any two batch shapes.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

N_CTX_TRAIN = 8192
N_EMBD = 64
N_LAYERS = 2
# Beyond it a layer of the sliding-window model sees nothing.
N_WINDOW = 32

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Ids as SentencePiece has them: three special tokens, the bytes, and a few ordinary pieces.
_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *_LETTERS]
_TYPES = [
    gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL,
    *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * (1 + len(_LETTERS)),
]  # fmt: skip
N_VOCAB = len(_TOKENS)
_FIRST_WORDLY = 3 + 256

Array = npt.NDArray[np.float32]


def prompt(n_tokens: int, seed: int = 0) -> list[int]:
    """Return BOS and random letters, n_tokens in all; another seed, another prompt."""
    random = np.random.default_rng(seed)
    return [1, *map(int, random.integers(_FIRST_WORDLY, N_VOCAB, n_tokens - 1))]


class _File:
    """A GGUF file being written, with the metadata that all architectures share."""

    def __init__(self, path: Path, architecture: str, seed: int) -> None:
        self.writer = gguf.GGUFWriter(path, architecture)
        self._random = np.random.default_rng(seed)
        self.writer.add_name(f"tiny-{architecture}")
        self.writer.add_context_length(N_CTX_TRAIN)
        self.writer.add_embedding_length(N_EMBD)
        self.writer.add_block_count(N_LAYERS)
        self.writer.add_layer_norm_rms_eps(1e-5)
        self.writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        self._add_vocabulary()

    def add(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """Add random weights of shape, row-major, that keep the scale of what they multiply."""
        values = self._random.standard_normal(shape) * gain / np.sqrt(shape[-1])
        self.put(name, values.astype(np.float32))

    def put(self, name: str, values: Array) -> None:
        self.writer.add_tensor(name, values)

    def fill(self, name: str, n: int, value: float = 1.0) -> None:
        self.put(name, np.full(n, value, np.float32))

    def add_ends(self, gain: float = 1.0) -> None:
        """Add embeddings and output; only letters and the blank are ever likely to be picked."""
        embeddings = self._random.standard_normal((N_VOCAB, N_EMBD)) * gain
        self.put("token_embd.weight", embeddings.astype(np.float32))
        output = self._random.standard_normal((N_VOCAB, N_EMBD)) * 4 / np.sqrt(N_EMBD)
        output[:_FIRST_WORDLY] = 0
        self.put("output.weight", output.astype(np.float32))
        self.fill("output_norm.weight", N_EMBD)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _add_vocabulary(self) -> None:
        self.writer.add_tokenizer_model("llama")
        self.writer.add_token_list(_TOKENS)
        self.writer.add_token_scores([0.0] * N_VOCAB)
        self.writer.add_token_types(_TYPES)
        self.writer.add_bos_token_id(1)
        self.writer.add_eos_token_id(2)
        self.writer.add_unk_token_id(0)
        self.writer.add_add_bos_token(True)
        self.writer.add_add_space_prefix(False)


def write_llama(path: Path, seed: int = 1) -> Path:
    """Write a model with full attention to path and return it."""
    return _write_transformer(path, "llama", seed)


def write_gemma(path: Path, seed: int = 1) -> Path:
    """Write a model to path whose first layer has a sliding window of N_WINDOW tokens."""
    return _write_transformer(path, "gemma3", seed)


def _write_transformer(path: Path, architecture: str, seed: int) -> Path:
    n_heads, n_kv_heads, n_head, n_ff = 4, 2, 16, 2 * N_EMBD
    is_gemma = architecture == "gemma3"
    file = _File(path, architecture, seed)
    file.writer.add_feed_forward_length(n_ff)
    file.writer.add_head_count(n_heads)
    file.writer.add_head_count_kv(n_kv_heads)
    file.writer.add_key_length(n_head)
    file.writer.add_value_length(n_head)
    file.writer.add_rope_dimension_count(n_head)
    if is_gemma:
        file.writer.add_sliding_window(N_WINDOW)
    # Small embeddings and strong attention: the answer hangs on the whole prompt, not on the last
    # token alone (Gemma's graph multiplies embeddings by the root of their length).
    file.add_ends(gain=0.25 / np.sqrt(N_EMBD) if is_gemma else 0.25)
    for i in range(N_LAYERS):
        file.fill(f"blk.{i}.attn_norm.weight", N_EMBD)
        file.add(f"blk.{i}.attn_q.weight", n_heads * n_head, N_EMBD, gain=2.0)
        file.add(f"blk.{i}.attn_k.weight", n_kv_heads * n_head, N_EMBD, gain=2.0)
        file.add(f"blk.{i}.attn_v.weight", n_kv_heads * n_head, N_EMBD, gain=2.0)
        file.add(f"blk.{i}.attn_output.weight", N_EMBD, n_heads * n_head, gain=2.0)
        if is_gemma:
            file.fill(f"blk.{i}.attn_q_norm.weight", n_head, 4.0)
            file.fill(f"blk.{i}.attn_k_norm.weight", n_head)
            file.fill(f"blk.{i}.post_attention_norm.weight", N_EMBD, 2.0)
            file.fill(f"blk.{i}.post_ffw_norm.weight", N_EMBD)
        file.fill(f"blk.{i}.ffn_norm.weight", N_EMBD)
        file.add(f"blk.{i}.ffn_gate.weight", n_ff, N_EMBD)
        file.add(f"blk.{i}.ffn_up.weight", n_ff, N_EMBD)
        file.add(f"blk.{i}.ffn_down.weight", N_EMBD, n_ff)
    file.close()
    return path


def write_mamba(path: Path, seed: int = 1) -> Path:
    """Write a recurrent model to path: its state after n tokens can't be cut to fewer."""
    n_inner, n_state, n_conv, n_rank = 2 * N_EMBD, 8, 4, 4
    file = _File(path, "mamba", seed)
    file.writer.add_feed_forward_length(0)
    file.writer.add_head_count(0)
    file.writer.add_ssm_conv_kernel(n_conv)
    file.writer.add_ssm_inner_size(n_inner)
    file.writer.add_ssm_state_size(n_state)
    file.writer.add_ssm_time_step_rank(n_rank)
    file.add_ends()
    for i in range(N_LAYERS):
        file.fill(f"blk.{i}.attn_norm.weight", N_EMBD)
        file.add(f"blk.{i}.ssm_in.weight", 2 * n_inner, N_EMBD)
        file.add(f"blk.{i}.ssm_conv1d.weight", n_inner, n_conv)
        file.fill(f"blk.{i}.ssm_conv1d.bias", n_inner, 0.0)
        file.add(f"blk.{i}.ssm_x.weight", n_rank + 2 * n_state, n_inner, gain=2.0)
        file.add(f"blk.{i}.ssm_dt.weight", n_inner, n_rank)
        file.fill(f"blk.{i}.ssm_dt.bias", n_inner, -3.0)
        decay = -np.arange(1, n_state + 1, dtype=np.float32) / n_state
        file.put(f"blk.{i}.ssm_a", np.tile(decay, (n_inner, 1)))
        file.fill(f"blk.{i}.ssm_d", n_inner)
        file.add(f"blk.{i}.ssm_out.weight", N_EMBD, n_inner, gain=2.0)
    file.close()
    return path
