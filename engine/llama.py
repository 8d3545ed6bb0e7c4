"""The only file that knows llama.cpp: one thin owner for each of its C objects.

In: paths, token ids, positions. Out: logits, token ids, byte pieces. Every owner's close() may be
called twice. Nothing here knows requests, slots or text; calls release the GIL, and an object must
be used by one thread at a time (Vocab excepted: tokenising reads only).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as c  # the declarations; the high-level API is not used
import numpy as np
import numpy.typing as npt

from headrace.engine.errors import ModelUnusable
from headrace.engine.llama_log import ContextBytes, LlamaLog
from headrace.engine.messages import SamplingParams
from headrace.engine.streaming import Functions, WeightStream

logger = logging.getLogger(__name__)

KV_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20,
    "bf16": 30,
}  # fmt: skip

_heard = LlamaLog()


@c.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _user_data: Any) -> None:
    """Keep what is needed here: errors are reasons for ours, which name the file."""
    line = text.decode("utf-8", "replace").strip(" .\n")
    if not line:
        return
    _heard.hear(level, line)
    logger.debug("%s", line)


def start_backend() -> None:
    """Initialise llama.cpp and route its log, before anything else here; again is harmless."""
    c.llama_log_set(_log, ctypes.c_void_p(0))
    c.llama_backend_init()


def library() -> ctypes.CDLL:
    """Return llama.cpp's library, which has ggml's functions too."""
    loaded: ctypes.CDLL = c._lib
    return loaded


def streaming_functions() -> Functions:
    """Return the addresses of ggml's functions that a WeightStream calls."""
    names = (
        "ggml_version", "ggml_backend_cpu_buffer_type", "ggml_backend_buft_name",
        "ggml_backend_buffer_init", "ggml_backend_tensor_get",
    )  # fmt: skip
    version, cpu, name, init, get = (
        ctypes.cast(getattr(c._lib, function), ctypes.c_void_p).value or 0 for function in names
    )
    return version, cpu, name, init, get


def cpu_buffer_type() -> int:
    """Return the address of the buffer type of the CPU's memory."""
    function = ctypes.CFUNCTYPE(ctypes.c_void_p)(("ggml_backend_cpu_buffer_type", c._lib))
    return int(function() or 0)


class Vocab:
    """The tokenizer of a loaded model; safe to use from several threads."""

    def __init__(self, pointer: Any) -> None:
        self._vocab = pointer
        self.n_tokens: int = c.llama_vocab_n_tokens(pointer)
        self.bos: int = c.llama_vocab_bos(pointer)
        self.eos: int = c.llama_vocab_eos(pointer)
        self.adds_bos: bool = c.llama_vocab_get_add_bos(pointer)
        self._pieces: dict[int, bytes] = {}

    def tokenize(self, text: str, *, parses_control: bool) -> list[int]:
        """Return the token ids of text, without any BOS or EOS added.

        Control tokens spelled in text become those tokens only if parses_control is true.
        """
        data = text.encode("utf-8")
        n_max = len(data) + 8
        while True:
            out = (c.llama_token * n_max)()
            n = c.llama_tokenize(self._vocab, data, len(data), out, n_max, False, parses_control)
            if n >= 0:
                return list(out[:n])
            n_max = -n

    def piece(self, token: int) -> bytes:
        """Return the bytes that token stands for; control tokens give none."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._read_piece(token, special=False)
        return found

    def text(self, token: int) -> str:
        """Return token spelled out, control tokens too; "" for a negative id."""
        if token < 0:
            return ""
        return self._read_piece(token, special=True).decode("utf-8", "replace")

    def spell(self, token: int) -> bytes:
        """Return the bytes of token, those of a control token's name if it stands for none."""
        return self.piece(token) or self._read_piece(token, special=True)

    def _read_piece(self, token: int, special: bool) -> bytes:
        n_max = 64
        while True:
            buffer = ctypes.create_string_buffer(n_max)
            n = c.llama_token_to_piece(self._vocab, token, buffer, n_max, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            n_max = -n

    def ends_generation(self, token: int) -> bool:
        """Tell whether token ends the answer (EOS, end of turn, ...)."""
        return bool(c.llama_vocab_is_eog(self._vocab, token))

    def control_texts(self) -> tuple[str, ...]:
        """Return the spellings that tokenize would parse as control tokens."""
        control = (i for i in range(self.n_tokens) if c.llama_vocab_is_control(self._vocab, i))
        return tuple(text for i in control if (text := self.text(i)))

    def contains(self, tokens: Iterable[int]) -> bool:
        """Tell whether all tokens are ids of this vocabulary."""
        return all(0 <= token < self.n_tokens for token in tokens)


class Model:
    """Weights and vocabulary of one GGUF file, loaded by llama.cpp's own loader or streamed."""

    def __init__(
        self, path: Path, *, repacks: bool = True, stream: WeightStream | None = None,
        overrides: Sequence[tuple[str, int]] = (), gpu: int | None = None, n_gpu_layers: int = 0,
        lends_weights: bool = False, simulates: bool = False,
        metadata: Mapping[str, int | str] | None = None,
    ) -> None:  # fmt: skip
        """Load path wholly into memory's reach (mmap; repacked copies if repacks).

        With a stream, which is then the model's, its weights are loaded from and used through it;
        those that it streams are never repacked. One that streams nothing is closed once all is
        loaded. overrides are regular expressions of tensor names, each with the address of the
        buffer type that takes them. gpu is the address of a device of ggml: the output is the first
        of its layers, then the model's from the last on. For large batches it may take weights from
        memory, where they are as in the file then, if lends_weights; what is streamed can't be
        lent. A model that simulates has no weights, and contexts made from it have no memory: they
        can only tell their sizes. metadata is taken instead of what the file has under these keys.

        Raises:
            ModelUnusable: llama.cpp refuses the file; the message gives its reason.
        """
        params = c.llama_model_default_params()
        _heard.begin()
        self.stream = stream
        params.use_extra_bufts = repacks
        # Whatever is not asked for is on the CPU; by default llama.cpp takes all GPUs there are.
        devices = (ctypes.c_void_p * 2)(gpu, None)
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        params.n_gpu_layers = n_gpu_layers
        self.lends_weights = lends_weights
        params.no_host = not lends_weights
        if stream is not None:
            streamed = [(pattern, stream.native.buffer_type) for pattern in stream.patterns]
            overrides = [*streamed, *overrides]
        array = _overrides(overrides)
        params.tensor_buft_overrides = ctypes.cast(array, ctypes.c_void_p)
        changed = _metadata(metadata or {})
        params.kv_overrides = changed
        if simulates:
            params.no_alloc, params.load_mode = True, c.LLAMA_LOAD_MODE_NONE
        self._load(path, params)
        self.vocab = Vocab(c.llama_model_get_vocab(self.pointer))
        self.n_ctx_train: int = c.llama_model_n_ctx_train(self.pointer)
        self.n_swa: int = c.llama_model_n_swa(self.pointer)
        self.size_bytes: int = c.llama_model_size(self.pointer)
        self.is_recurrent: bool = c.llama_model_is_recurrent(
            self.pointer
        ) or c.llama_model_is_hybrid(self.pointer)
        """Whether the state of a sequence can't be cut at any position (Mamba, RWKV, hybrids)."""

    def _load(self, path: Path, params: Any) -> None:
        """Load by llama.cpp's own loader, or through the stream; what params points to is held."""
        stream = self.stream
        if stream is None:
            self.pointer = c.llama_model_load_from_file(os.fsencode(path), params)
            """llama.cpp's own object; None once closed."""
        else:
            self.pointer = _load_streamed(stream, params)
        try:
            if not self.pointer:
                error = stream.load_error() if stream is not None else None
                raise ModelUnusable(
                    error or f"{path}: {_heard.reason('llama.cpp refuses the file')}"
                )
            if stream is not None:
                stream.start()
            if stream is not None and not stream.patterns:
                stream.close()
                self.stream = None
        except ModelUnusable:
            self.close()
            raise

    def close(self) -> None:
        """Free the weights; contexts made from them must be closed before."""
        if self.pointer:
            c.llama_model_free(self.pointer)
            self.pointer = None
        if self.stream is not None:
            self.stream.close()


def _load_streamed(stream: WeightStream, params: Any) -> Any:
    """Load a model from the stream's file; None if llama.cpp refuses it."""
    params.load_mode = c.LLAMA_LOAD_MODE_NONE
    params.lazy_mode = c.LLAMA_LAZY_MODE_OFF
    return c.llama_model_load_from_file_ptr(stream.native.file, params)


class _BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override; the binding only declares a pointer to it."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def _overrides(pairs: Sequence[tuple[str, int]]) -> Any:
    """Return pairs as llama.cpp's array, whose end is zero."""
    array = (_BufferOverride * (len(pairs) + 1))()
    for override, (pattern, buffer_type) in zip(array, pairs, strict=False):
        override.pattern, override.buffer_type = pattern.encode(), buffer_type
    return array


def _metadata(values: Mapping[str, int | str]) -> Any:
    """Return values as llama.cpp's array, whose end is zero."""
    array = (c.llama_model_kv_override * (len(values) + 1))()
    for override, (key, value) in zip(array, values.items(), strict=False):
        override.key = key.encode()
        if isinstance(value, str):
            override.tag, override.value.val_str = c.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
        else:
            override.tag, override.value.val_i64 = c.LLAMA_KV_OVERRIDE_TYPE_INT, value
    return array


class Batch:
    """Tokens for one forward pass; n_max tokens, one sequence each."""

    def __init__(self, n_max: int) -> None:
        self._batch = c.llama_batch_init(n_max, 0, 1)
        self.n_max = n_max

    def fill(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int],
        wants_logits: Sequence[bool],
    ) -> None:  # fmt: skip
        """Replace the content; the four sequences have one entry for each token."""
        batch = self._batch
        batch.n_tokens = n = len(tokens)
        for i in range(n):
            batch.token[i] = tokens[i]
            batch.pos[i] = positions[i]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq_ids[i]
            batch.logits[i] = wants_logits[i]

    def fill_prompt(self, tokens: Sequence[int], first: int, seq_id: int, is_last: bool) -> None:
        """Replace the content by a chunk of one prompt that starts at position first."""
        n = len(tokens)
        wants = [False] * n
        wants[-1] = is_last
        self.fill(tokens, range(first, first + n), [seq_id] * n, wants)

    @property
    def n_tokens(self) -> int:
        return int(self._batch.n_tokens)

    def add_companion(self, seq_id: int) -> None:
        """Append a token whose result nobody wants, at the start of an empty sequence."""
        batch, i = self._batch, self.n_tokens
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = batch.token[0], 0, 1
        batch.seq_id[i][0], batch.logits[i] = seq_id, False
        batch.n_tokens = i + 1

    def close(self) -> None:
        if self._batch is not None:
            c.llama_batch_free(self._batch)
            self._batch = None


class Context:
    """KV cache and compute buffers over a model; all sequences share n_cells cells."""

    def __init__(
        self, model: Model, *, n_cells: int, n_seqs: int, n_batch: int, n_threads: int,
        n_threads_batch: int, kv_type: str = "f16", n_ubatch: int = 0,
    ) -> None:  # fmt: skip
        """Allocate a context; n_ubatch, if not 0, is the physical batch that n_batch is cut into.

        Raises:
            ModelUnusable: llama.cpp can't make it (memory, or a KV type that the model can't use).
        """
        params = c.llama_context_default_params()
        params.n_ctx = n_cells
        params.n_seq_max = n_seqs
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch or n_batch
        params.n_outputs_max = max(n_seqs, 1)
        params.n_threads = n_threads
        params.n_threads_batch = n_threads_batch
        params.type_k = params.type_v = KV_TYPES[kv_type]
        params.kv_unified = True
        # A full-size window cache lets sliding-window models rewind like all others.
        params.swa_full = True
        params.no_perf = True
        params.op_offload = model.lends_weights
        if model.stream is not None:
            native = model.stream.native
            params.cb_eval = c.ggml_backend_sched_eval_callback(native.eval_callback)
            params.cb_eval_user_data = native.user_data
            params.abort_callback = c.ggml_abort_callback(native.abort_callback)
            params.abort_callback_data = native.user_data
        _heard.begin()
        self._model = model
        self._ctx = c.llama_init_from_model(model.pointer, params)
        if not self._ctx:
            raise ModelUnusable(f"no context of {n_cells} cells: {_heard.reason('out of memory')}")
        self.said_bytes: ContextBytes | None = _heard.context_bytes()
        """What llama.cpp says that the context takes; None if it did not say all."""
        self._memory = c.llama_get_memory(self._ctx)
        self.n_cells: int = c.llama_n_ctx(self._ctx)
        self.n_vocab = model.vocab.n_tokens

    def decode(self, batch: Batch) -> int:
        """Evaluate batch; 0 done, 1 no free cells (nothing changed), else llama.cpp's error.

        Raises:
            WeightsUnreadable: a streamed weight could not be read; the batch was not evaluated.
        """
        status = int(c.llama_decode(self._ctx, batch._batch))
        if self._model.stream is not None:
            error = self._model.stream.finish()
            if error is not None:
                raise error
        return status

    def logits(self, i: int) -> npt.NDArray[np.float32]:
        """Return the logits of the batch's token i, (n_vocab,) float32, valid until decode."""
        pointer = c.llama_get_logits_ith(self._ctx, i)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))

    def remove(self, seq_id: int, first: int = 0) -> bool:
        """Forget the positions of a sequence from first on; False if its state can't be cut."""
        return bool(c.llama_memory_seq_rm(self._memory, seq_id, first, -1))

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Let target share the first n_tokens cells of source."""
        c.llama_memory_seq_cp(self._memory, source, target, 0, n_tokens)

    def holds_window(self, seq_id: int, n_tokens: int) -> bool:
        """Tell whether evaluation can go on at position n_tokens of a sequence.

        Cells outside a sliding window may have been given to others; then the windows of the
        positions before n_tokens are incomplete.
        """
        if self._model.n_swa <= 0:
            return True
        first = int(c.llama_memory_seq_pos_min(self._memory, seq_id))
        return 0 <= first <= max(0, n_tokens - self._model.n_swa)

    def saves_window(self, n_saved: int, n_tokens: int) -> bool:
        """Tell the same of a whole state of n_saved tokens: it has the window of its end only."""
        n_swa = self._model.n_swa
        return n_swa <= 0 or n_saved <= n_swa or n_tokens >= n_saved

    def state_bytes(self, seq_id: int, *, whole: bool = True) -> int:
        """Return the bytes of what save would."""
        flags = c.LLAMA_STATE_SEQ_FLAGS_NONE if whole else c.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        return int(c.llama_state_seq_get_size_ext(self._ctx, seq_id, flags))

    def save(self, seq_id: int, *, whole: bool) -> bytearray:
        """Return the state of a sequence: whole, or only what can't be cut (recurrent layers)."""
        flags = c.LLAMA_STATE_SEQ_FLAGS_NONE if whole else c.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        n_bytes = self.state_bytes(seq_id, whole=whole)
        state = bytearray(n_bytes)
        buffer = (ctypes.c_uint8 * n_bytes).from_buffer(state)
        n_written = c.llama_state_seq_get_data_ext(self._ctx, buffer, n_bytes, seq_id, flags)
        if n_written != n_bytes:
            raise RuntimeError(f"the state of sequence {seq_id} is {n_written} of {n_bytes} bytes")
        return state

    def restore(self, seq_id: int, state: bytearray, *, whole: bool) -> bool:
        """Put a state from save() into a sequence, which is empty if whole; False if no room."""
        flags = c.LLAMA_STATE_SEQ_FLAGS_NONE if whole else c.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        n_read = c.llama_state_seq_set_data_ext(self._ctx, buffer, len(state), seq_id, flags)
        return bool(n_read == len(state))

    def close(self) -> None:
        if self._ctx:
            c.llama_free(self._ctx)
            self._ctx = None


class Sampler:
    """llama.cpp's sampler chain for one sequence."""

    def __init__(self, params: SamplingParams, vocab: Vocab, n_ctx: int) -> None:
        """Build the chain in llama.cpp's order: penalties, top_k, typical_p, top_p, min_p, temp."""
        chain_params = c.llama_sampler_chain_default_params()
        chain_params.no_perf = True
        self._chain = c.llama_sampler_chain_init(chain_params)
        for sampler in _samplers(params, vocab.n_tokens, n_ctx):
            c.llama_sampler_chain_add(self._chain, sampler)
        n_last = n_ctx if params.repeat_last_n < 0 else params.repeat_last_n
        self.n_accepts = n_last if _has_penalties(params) else 0
        """How many of the last prompt tokens the penalties want to be told of."""

    def sample(self, context: Context, i: int) -> int:
        """Pick the token that follows the batch's token i, and remember it."""
        return int(c.llama_sampler_sample(self._chain, context._ctx, i))

    def accept(self, tokens: Iterable[int]) -> None:
        """Tell the penalties of tokens that were not sampled."""
        for token in tokens:
            c.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        if self._chain:
            c.llama_sampler_free(self._chain)  # frees the samplers in it too
            self._chain = None


def _has_penalties(params: SamplingParams) -> bool:
    changes = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
    return params.repeat_last_n != 0 and changes != (1.0, 0.0, 0.0)


def _samplers(params: SamplingParams, n_vocab: int, n_ctx: int) -> Iterable[Any]:
    """Yield the samplers for params; those that would change nothing are left out."""
    if _has_penalties(params):
        yield c.llama_sampler_init_penalties(
            n_vocab,
            n_ctx if params.repeat_last_n < 0 else params.repeat_last_n,
            params.repeat_penalty, params.frequency_penalty, params.presence_penalty,
        )  # fmt: skip
    if params.temperature <= 0:
        yield c.llama_sampler_init_greedy()
        return
    if params.top_k > 0:
        yield c.llama_sampler_init_top_k(params.top_k)
    if params.typical_p < 1:
        yield c.llama_sampler_init_typical(params.typical_p, 1)
    if params.top_p < 1:
        yield c.llama_sampler_init_top_p(params.top_p, 1)
    if params.min_p > 0:
        yield c.llama_sampler_init_min_p(params.min_p, 1)
    yield c.llama_sampler_init_temp(params.temperature)
    seed = c.LLAMA_DEFAULT_SEED if params.seed < 0 else params.seed
    yield c.llama_sampler_init_dist(seed & 0xFFFFFFFF)
