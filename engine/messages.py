"""All that crosses the border between the server process and an engine process.

A frame is a 4-byte little-endian length and MessagePack: one Command (to the engine), or a list of
Events (from it): those of one step for all sequences. Weights, logits and KV never cross. A process
that measures gets one Question, and answers with Findings.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.engine.profile import DiskProfile, GpuDevice, KernelSpeed

DoneReason = Literal["stop", "length", "cancelled"]
Mode = Literal["auto", "full-resident", "expert-streaming", "dense-ffn-streaming"]
Limit = Literal["disk", "memory bandwidth", "compute"]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of every message; the tag on the wire is the class name."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of prompt text; in user text (is_trusted false) control tokens are plain text."""

    text: str
    is_trusted: bool


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is picked; names and defaults are Ollama's options.

    temperature <= 0 is greedy; top_k <= 0, top_p >= 1, typical_p >= 1, min_p <= 0 are off;
    repeat_last_n 0 is off, -1 the whole context; seed < 0 is random.
    """

    seed: int = -1
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class ContextCost(Message, frozen=True, kw_only=True):
    """What contexts of a model take, as llama.cpp says."""

    kv_type: str
    """Of the cells that kv_bytes_per_cell is about."""
    kv_bytes_per_cell: float
    mask_bytes_per_cell: float
    """By which the buffers of a batch grow."""
    fixed_bytes: int
    """With any number of cells: buffers, logits, states of recurrent layers."""


class Load(Message, frozen=True, kw_only=True):
    """Load the model; the first command of an engine process. n_ctx is per slot."""

    path: str
    name: str
    n_ctx: int
    n_slots: int
    n_batch: int
    n_threads: int
    n_threads_batch: int
    decode_cpus: tuple[int, ...] = ()
    """CPUs that compute threads are pinned to; empty: not pinned."""
    io_cpus: tuple[int, ...] = ()
    """CPUs for tokenisation and I/O; empty: anywhere."""
    least_ctx: int = 0
    """What n_ctx may be where memory is short; 0: it may not be less."""
    kv_type: str = "f16"
    log_level: str = "info"
    memory_bytes: int = 0
    """All that the process may take, its interpreter too; 0: what the machine has free."""
    vram_bytes: int | None = None
    """All of it that is on a GPU; 0: no GPU is used; None: what the GPU has free."""
    mode: Mode = "auto"
    disk_bytes_per_s: float = 0.0
    """Of reads in order from the disk that holds the model; 0: not known."""
    context_cost: ContextCost | None = None
    """None: not known, and estimated."""


class Generate(Message, frozen=True, kw_only=True):
    """Generate from a prompt; answered by Accepted, Token..., and one Done or Failed."""

    uid: int
    prompt: tuple[Segment, ...]
    sampling: SamplingParams = SamplingParams()
    n_ctx: int = 0
    """Context asked for; 0: whatever is loaded. Another size re-creates the context."""
    n_predict: int = -1
    """Tokens to generate; -1: to the end or 10 contexts; -2: to the context's end; 0: none."""
    n_keep: int = 4
    """Prompt tokens kept when the context shifts; -1: the whole prompt."""
    stop: tuple[str, ...] = ()
    shifts: bool = True
    """Whether a full context drops its oldest half and goes on, or ends with reason length."""
    truncates: bool = False
    """Whether a prompt over the context is cut in its middle (raw prompts) or fails."""
    prefix_tokens: tuple[int, ...] = ()
    """Tokens put before the prompt (Ollama's deprecated context)."""
    wants_context: bool = False
    """Whether Done carries the tokens of prompt and answer."""
    n_top_logprobs: int = -1
    """-1: no logprobs; else the alternatives wanted for each token, 0 to 20."""
    ignores_end: bool = False
    """Whether n_predict tokens are generated whatever they are: a measurement's length is fixed."""


class Count(Message, frozen=True, kw_only=True):
    """Count the tokens of several prompts; answered by one Counted or Failed."""

    uid: int
    prompts: tuple[tuple[Segment, ...], ...]


class Cancel(Message, frozen=True):
    """Forget a request; no further event of it is sent once it has reached the engine."""

    uid: int


class MoreMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a larger budget would give."""

    budget_bytes: int
    mode: Mode
    decode_tokens_per_s: float
    limit: Limit


class Forecast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is expected of a model before it is loaded."""

    decode_tokens_per_s: float
    ttft_s_per_1000_tokens: float
    load_s: float
    limit: Limit
    """What decoding waits for most."""
    read_bytes_per_token: float
    expert_hit_rate: float | None
    """None: no experts are streamed."""
    hit_rate_source: Literal["learnt", "prior"] | None
    correction: float
    """What decode_tokens_per_s was multiplied by, learnt from earlier runs."""
    unmeasured_types: tuple[str, ...]
    """Types of weights that the profile lacks; they count as the slowest that it has."""
    more_memory: tuple[MoreMemory, ...]


class Tiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a loaded model's weights are."""

    mode: Mode
    budget_bytes: int
    """Memory that everything may take."""
    resident_bytes: int
    """Weights that stay in memory."""
    stream_bytes: int
    """Memory of the expert cache or the ring."""
    streamed_bytes: int
    """Weights that are read from the disk when they are needed."""
    vram_bytes: int = 0
    """Weights, context and buffers in a GPU's memory."""


class Loaded(Message, frozen=True, kw_only=True):
    """The model is ready."""

    n_ctx: int
    n_ctx_train: int
    n_slots: int
    n_vocab: int
    control_tokens: tuple[str, ...]
    """Texts that the tokenizer would parse as control tokens in trusted text."""
    bos: str
    eos: str
    adds_bos: bool
    weights_bytes: int
    context_bytes: int
    load_ns: int
    tiers: Tiers
    forecast: Forecast | None
    """None: the machine, or the disk that holds the model, was not measured."""


class LoadFailed(Message, frozen=True):
    """The model can't be loaded; the engine process ends after it."""

    message: str


class ContextChanged(Message, frozen=True, kw_only=True):
    """The context was re-created for a request with another n_ctx."""

    n_ctx: int
    context_bytes: int


class Status(Message, frozen=True, kw_only=True):
    """How the engine is doing; sent when that has changed."""

    measured_tokens_per_s: float | None = None
    """Of decoding alone, the median of the last answers; None: none was alone for 64 tokens."""
    cache_share: float | None = None
    """The part of the planned expert cache that there is memory for; None: there is no cache."""
    parked_bytes: int = 0
    """Of prefixes that are kept outside the context."""


class Accepted(Message, frozen=True, kw_only=True):
    """The prompt is tokenised and fits; the request waits for its slot."""

    uid: int
    n_prompt: int


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its natural-log probability and its alternatives, best first."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class Token(Message, frozen=True, kw_only=True):
    """New text of a sequence: one or more tokens' worth, whole UTF-8 characters only."""

    uid: int
    text: str
    logprobs: tuple[Logprob, ...] = ()


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and durations of a finished request; n_prompt includes the n_cached reused tokens."""

    n_prompt: int
    n_cached: int
    n_generated: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int


class Done(Message, frozen=True, kw_only=True):
    """The sequence is finished and its slot free; text is what was still held back."""

    uid: int
    reason: DoneReason
    timings: Timings
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()
    context: tuple[int, ...] = ()


class Failed(Message, frozen=True, kw_only=True):
    """The request ended with an error; kind is the class name in errors.py."""

    uid: int
    kind: str
    status: int
    message: str
    n_prompt: int = 0
    n_ctx: int = 0


class Counted(Message, frozen=True, kw_only=True):
    """Token counts of a Count's prompts, in order, BOS included."""

    uid: int
    n_tokens: tuple[int, ...]


class AskContextCost(Message, frozen=True):
    """Ask llama.cpp what contexts take when a model is loaded so; the process's only question."""

    load: Load


class Measure(Message, frozen=True, kw_only=True):
    """Measure this machine, with so many compute threads; the process's only question."""

    n_threads: int
    cpus: tuple[int, ...]
    """CPUs that compute threads are pinned to; empty: not pinned."""
    types: tuple[tuple[str, int], ...]
    """Names and numbers of the tensor types whose kernels are measured."""
    memory_and_gpus: bool
    path: str
    """A file on the disk that is measured; "" for none."""


class Measuring(Message, frozen=True):
    """What is being measured now, for people who wait."""

    what: str


class Measured(Message, frozen=True, kw_only=True):
    """All that was asked for."""

    memory_bytes_per_s: float | None
    attention_flops: float | None
    gpus: tuple[GpuDevice, ...] | None
    kernels: tuple[KernelSpeed, ...]
    disk: DiskProfile | None


class MeasureFailed(Message, frozen=True):
    """Something could not be found out; the message of an EngineError."""

    message: str


Command = Load | Generate | Count | Cancel
Event = Loaded | LoadFailed | ContextChanged | Status | Accepted | Token | Done | Failed | Counted

Question = Measure | AskContextCost
Finding = Measuring | Measured | ContextCost | MeasureFailed

encode = msgspec.msgpack.Encoder().encode
decode_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
decode_events: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[Event])
decode_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
decode_finding: msgspec.msgpack.Decoder[Finding] = msgspec.msgpack.Decoder(Finding)
