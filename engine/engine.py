"""The engine: one thread that owns model, context, KV cache and the sequences being evaluated.

In: requests with their tokens, through submit and cancel from any thread. Out: lists of events, one
list a step, to the function given. Knows no socket, no HTTP and no text templates.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable

from headrace.engine.errors import (
    EngineError,
    InvalidRequest,
    ModelUnusable,
    PromptTooLong,
    WeightsUnreadable,
)
from headrace.engine.governor import PERIOD_S, Watch
from headrace.engine.kv_cache import KVCache, n_sequence_ids
from headrace.engine.llama import Batch, Context, Model, Sampler
from headrace.engine.logprobs import token_logprob
from headrace.engine.messages import (
    Accepted,
    ContextChanged,
    Done,
    DoneReason,
    Event,
    Failed,
    Generate,
    Load,
    Status,
    Token,
)
from headrace.engine.pace import Pace
from headrace.engine.plan import ContextPlan
from headrace.engine.pressure import Gauge
from headrace.engine.scheduler import plan_step
from headrace.engine.sequence import Sequence, State
from headrace.engine.weights import StreamStats

logger = logging.getLogger(__name__)

Emit = Callable[[list[Event]], None]
PlanContext = Callable[[int], ContextPlan]


class Engine:
    """Runs requests on one model; everything but submit, cancel and stop is its own thread's."""

    def __init__(
        self, model: Model, load: Load, plan_context: PlanContext, emit: Emit, n_ubatch: int = 0,
        pace: Pace | None = None,
    ) -> None:  # fmt: skip
        """Take over model and make its first context; plan_context plans one for a wanted n_ctx.

        n_ubatch, if not 0, is the physical batch that a forward pass is cut into; pace is told of
        what could be measured.

        Raises:
            ModelUnusable: the context can't be made.
        """
        self.model = model
        self.vocab = model.vocab
        self._load = load
        self._plan_context = plan_context
        self._emit = emit
        self._n_ubatch = n_ubatch
        self.pace = pace or Pace()
        self._stream_marks: dict[int, StreamStats] = {}
        self._inbox: queue.SimpleQueue[tuple[Generate, list[int]] | int | None] = (
            queue.SimpleQueue()
        )
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._events: list[Event] = []
        self._status = Status()
        self._is_stopping = False
        self._is_crowded = False
        self._prefill_tokens_per_s = 0.0
        self._batch = Batch(max(load.n_batch, load.n_slots + 1))
        self._open_context(plan_context(load.n_ctx))
        self._watch = Watch(model.stream, Gauge())

    # ---- any thread ----

    def submit(self, request: Generate, tokens: list[int]) -> None:
        """Queue a request whose prompt is tokens (BOS included, not empty)."""
        self._inbox.put((request, tokens))

    def cancel(self, uid: int) -> None:
        """Forget a request; its slot is free after the step at hand. Unknown ids are ignored."""
        self._inbox.put(uid)

    def stop(self) -> None:
        """Let run return after the step at hand; open requests get no more events."""
        self._inbox.put(None)

    # ---- the engine thread ----

    @property
    def plan(self) -> ContextPlan:
        """The present context."""
        return self._plan

    @property
    def n_ctx(self) -> int:
        """Tokens that each sequence may have."""
        return self._plan.n_ctx

    def run(self) -> None:
        """Serve requests until stop is called."""
        while not self._is_stopping:
            self.turn()

    def turn(self) -> None:
        """Take in what was submitted, waiting for it when there is nothing to do, and step once."""
        self._receive()
        if not self._is_stopping:
            self.step()

    def step(self) -> None:
        """Admit what fits, evaluate one pass of decode tokens and one chunk of a prompt."""
        self._watch.check(self._cache)
        self._admit()
        plan = plan_step(
            self._running, self._load.n_batch, self._prefill_tokens_per_s,
            snapshots=self.model.is_recurrent,
        )  # fmt: skip
        if plan.decode:
            self._decode(list(plan.decode))
        if plan.prefill is not None and plan.prefill.state is State.PREFILL:
            self._prefill(plan.prefill, plan.n_prefill)
        self._tell()
        self._flush()
        if not self._running and not self._waiting:
            self.check()

    def check(self) -> None:
        """Raise AssertionError unless held sequence ids and running sequences agree."""
        assert self._cache.n_held == len(self._running), (self._cache.n_held, len(self._running))

    def close(self) -> None:
        """Free context and weights; after run has returned."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.sampler is not None:
                sequence.sampler.close()
        self._watch.close()
        self._context.close()
        self._batch.close()
        self.model.close()

    def _receive(self) -> None:
        """Take in all that was submitted; wait for something when there is nothing to do."""
        is_idle = not self._running and not self._waiting and not self._uses_idle_time()
        # What is kept for later is given up while there is nothing to do, too.
        keeps = self._watch.cache_share is not None or self._cache.n_parked_bytes > 0
        patience_s = PERIOD_S if keeps else None
        while True:
            try:
                item = self._inbox.get(is_idle, patience_s)
            except queue.Empty:
                break
            is_idle = False
            if item is None:
                self._is_stopping = True
            elif isinstance(item, int):
                self._cancel(item)
            else:
                self._accept(*item)
        self._flush()

    def _uses_idle_time(self) -> bool:
        """Do a little of what is useful but not needed; False if there is nothing."""
        return self.model.stream is not None and self.model.stream.fill()

    def _tell(self) -> None:
        """Say how the engine is doing, if it has changed."""
        answer = self.pace.median
        status = Status(
            measured_tokens_per_s=None if answer is None else answer.tokens_per_s,
            cache_share=self._watch.cache_share, parked_bytes=self._cache.n_parked_bytes,
        )  # fmt: skip
        if status != self._status:
            self._status = status
            self._events.append(status)

    def _flush(self) -> None:
        if self._events:
            self._emit(self._events)
            self._events = []

    def _accept(self, request: Generate, tokens: list[int]) -> None:
        """Queue a request if its prompt fits the context that it will run in."""
        n_ctx = self.n_ctx
        if request.n_ctx or len(tokens) >= n_ctx:
            n_ctx = self._plan_context(request.n_ctx or self._load.n_ctx).n_ctx
        try:
            sequence = Sequence(request, self._fit(request, tokens, n_ctx), n_ctx)
        except EngineError as error:
            self._fail(request.uid, error)
            return
        self._waiting.append(sequence)
        self._events.append(Accepted(uid=request.uid, n_prompt=sequence.n_prompt))

    def _fit(self, request: Generate, tokens: list[int], n_ctx: int) -> list[int]:
        """Return tokens, cut in their middle if they are too many and the request allows it."""
        if not tokens:
            raise InvalidRequest("the prompt has no tokens")
        if len(tokens) < n_ctx:
            return tokens
        if not (request.truncates and request.shifts):
            raise PromptTooLong(len(tokens), n_ctx)
        # As Ollama: half of what num_keep leaves of the context stays free for the answer.
        n_keep = min(self._n_keep(request, len(tokens)), n_ctx - 2)
        n_kept = n_ctx - max((n_ctx - n_keep) // 2, 1)
        logger.warning("uid %d: prompt of %d tokens cut to %d", request.uid, len(tokens), n_kept)
        return tokens[:n_keep] + tokens[len(tokens) - (n_kept - n_keep) :]

    def _n_keep(self, request: Generate, n_prompt: int) -> int:
        if request.n_keep < 0:
            return n_prompt
        return min(request.n_keep + self.vocab.adds_bos, n_prompt)

    def _cancel(self, uid: int) -> None:
        for sequence in self._waiting:
            if sequence.uid == uid:
                self._waiting.remove(sequence)
                if sequence.sampler is not None:  # it ran before, and was preempted
                    sequence.sampler.close()
                sequence.move("finish")
                return
        for sequence in self._running:
            if sequence.uid == uid:
                self._leave(sequence)
                return

    def _admit(self) -> None:
        """Give free slots to waiting sequences, in order; a new context needs all slots free.

        After a sequence had to give up its cells nobody takes them until another one has left.
        """
        if self._is_crowded and self._running:
            return
        while self._waiting and len(self._running) < self._load.n_slots:
            sequence = self._waiting[0]
            if self._needs_context(sequence):
                if self._running:
                    return
                if not self._change_context(sequence):
                    continue
            self._waiting.popleft()
            sequence.n_ctx = self.n_ctx
            sequence.seq_id, sequence.n_past = self._cache.acquire(sequence.tokens)
            if sequence.n_generated == 0:
                sequence.n_cached = sequence.n_past
            sequence.move("admit")
            if sequence.sampler is None:
                sampler = Sampler(sequence.request.sampling, self.vocab, self.n_ctx)
                n_accepts = sampler.n_accepts
                sampler.accept(sequence.tokens[-n_accepts:] if n_accepts else ())
                sequence.sampler = sampler
            if self.model.stream is not None:
                self._stream_marks[sequence.uid] = self.model.stream.stats()
            self._running.append(sequence)

    def _needs_context(self, sequence: Sequence) -> bool:
        """Tell whether a sequence can't run in the present context.

        One that named no size runs in any that holds its prompt.
        """
        if sequence.n_ctx == self.n_ctx:
            return False
        return bool(sequence.request.n_ctx) or len(sequence.tokens) >= self.n_ctx

    def _change_context(self, sequence: Sequence) -> bool:
        """Re-create the context for the first waiting sequence; on failure keep the old size."""
        old, new = self._plan, self._plan_context(sequence.n_ctx)
        self._context.close()
        try:
            self._open_context(new)
        except ModelUnusable as error:
            self._open_context(old)
            self._waiting.popleft()
            sequence.move("finish")
            self._fail(sequence.uid, error)
            return False
        n_bytes = new.n_bytes + new.vram_bytes
        self._events.append(ContextChanged(n_ctx=new.n_ctx, context_bytes=n_bytes))
        return True

    def _open_context(self, plan: ContextPlan) -> None:
        n_seqs = n_sequence_ids(self._load.n_slots, can_cut=not self.model.is_recurrent)
        self._companion_id = n_seqs - 1
        self._context = Context(
            self.model, n_cells=plan.n_cells, n_seqs=n_seqs, n_batch=self._load.n_batch,
            n_threads=self._load.n_threads, n_threads_batch=self._load.n_threads_batch,
            kv_type=self._load.kv_type, n_ubatch=self._n_ubatch,
        )  # fmt: skip
        self._plan = plan
        self._cache = KVCache(
            self._context, n_seqs - 1, can_cut=not self.model.is_recurrent,
            parking_bytes=plan.parking_bytes,
        )  # fmt: skip
        logger.info("context: %d tokens a sequence, %d cells", plan.n_ctx, plan.n_cells)

    def _decode(self, sequences: list[Sequence]) -> None:
        """Evaluate the last token of each sequence and pick the next."""
        if len(self._running) == 1:
            self._cache.settle(sequences[0].seq_id)
        self._batch.fill(
            [s.tokens[-1] for s in sequences],
            [s.n_past for s in sequences],
            [s.seq_id for s in sequences],
            [True] * len(sequences),
        )
        stream = self.model.stream
        before = None if stream is None else stream.stats()
        if not self._evaluate(sequences):
            return
        if stream is not None and before is not None:
            stream.learn(before)
        if len(self._running) == 1:
            self.pace.step(sequences[0].uid)
        else:
            self.pace.interrupt()
        for i, sequence in enumerate(sequences):
            self._cache.extend(sequence.seq_id, sequence.tokens[-1:])
            sequence.n_past += 1
            self._sample(sequence, i)

    def _prefill(self, sequence: Sequence, n_tokens: int) -> None:
        """Evaluate the next n_tokens of a prompt; after the last one, pick the first token."""
        first = sequence.n_past
        chunk = sequence.tokens[first : first + n_tokens]
        is_last = first + len(chunk) == len(sequence.tokens)
        self._batch.fill_prompt(chunk, first, sequence.seq_id, is_last)
        self.pace.interrupt(sequence.uid)
        started = time.perf_counter()
        if not self._evaluate([sequence]):
            return
        seconds = time.perf_counter() - started
        self.pace.prefill(len(chunk), seconds)
        self._cache.extend(sequence.seq_id, chunk, saves=True)
        sequence.n_past += len(chunk)
        if is_last:
            sequence.move("prefilled")
            if sequence.n_generated == 0 and len(self._running) == 1:
                self.pace.start(sequence.uid, sequence.n_past)
            if sequence.n_predict > 0:
                self._sample(sequence, len(chunk) - 1)
            else:
                self._finish(sequence, "length")
        elif len(chunk) > 1:
            self._prefill_tokens_per_s = len(chunk) / seconds

    def _evaluate(self, sequences: list[Sequence]) -> bool:
        """Run the batch that was filled for sequences; False if it could not be run.

        When cells are short, an idle prefix leaves them first; then the youngest sequence does and
        queues again. Any other failure ends the sequences of the batch.
        """
        has_companion = self._batch.n_tokens == 1 and self._cache.wants_company(sequences[0].seq_id)
        if has_companion:
            self._batch.add_companion(self._companion_id)
        error: EngineError
        try:
            while (status := self._context.decode(self._batch)) == 1:
                if self._cache.evict():
                    continue
                self._preempt(self._running[-1])
                return False
            error = ModelUnusable(f"evaluating a batch failed with status {status}")
        except WeightsUnreadable as unreadable:
            logger.error("%s", unreadable)
            status, error = -1, unreadable
        if has_companion:
            self._context.remove(self._companion_id)
        if status == 0:
            return True
        for sequence in sequences:
            self._leave(sequence, keeps_prefix=False)
            self._fail(sequence.uid, error)
        return False

    def _preempt(self, sequence: Sequence) -> None:
        logger.info("uid %d: out of cells, queued again", sequence.uid)
        self._running.remove(sequence)
        self._cache.release(sequence.seq_id)
        self._cache.evict()
        self._is_crowded = True
        sequence.n_past = 0
        sequence.move("preempt")
        self._waiting.appendleft(sequence)

    def _sample(self, sequence: Sequence, i: int) -> None:
        """Pick the next token from logits i of the batch, and say or end what follows from it."""
        sampler = sequence.sampler
        assert isinstance(sampler, Sampler)
        token = sampler.sample(self._context, i)
        goes_on = sequence.request.ignores_end
        if self.vocab.ends_generation(token) and not goes_on:
            self._finish(sequence, "stop")
            return
        n_top = sequence.request.n_top_logprobs
        if n_top >= 0:
            logits = self._context.logits(i)
            sequence.held_logprobs.append(token_logprob(logits, token, n_top, self.vocab.spell))
        sequence.append(token)
        piece = self.vocab.piece(token)
        text = sequence.detokenizer.push(piece)
        if text:
            logprobs = tuple(sequence.held_logprobs)
            sequence.held_logprobs.clear()
            self._events.append(Token(uid=sequence.uid, text=text, logprobs=logprobs))
        if sequence.detokenizer.is_stopped:
            self._finish(sequence, "stop")
        elif sequence.n_generated >= sequence.n_predict:
            self._finish(sequence, "length")
        elif not goes_on and sequence.repeats(piece):
            self._finish(sequence, "length")
        elif len(sequence.tokens) >= self.n_ctx:
            self._make_room(sequence)

    def _make_room(self, sequence: Sequence) -> None:
        """Cut a sequence that fills its context, or end it.

        What is left is evaluated anew: its numbers are those of a fresh prompt of the same tokens,
        which moving the old cells would only approximate.
        """
        if not sequence.request.shifts:
            self._finish(sequence, "length")
            return
        sequence.cut(self._n_keep(sequence.request, sequence.n_prompt))
        sequence.n_past = self._cache.rewind(sequence.seq_id, sequence.tokens)
        sequence.move("shift")

    def _finish(self, sequence: Sequence, reason: DoneReason) -> None:
        text = "" if sequence.detokenizer.is_stopped else sequence.detokenizer.finish()
        context: tuple[int, ...] = ()
        if sequence.request.wants_context:
            context = tuple(sequence.tokens)
        self._leave(sequence)
        self._events.append(
            Done(
                uid=sequence.uid,
                reason=reason,
                timings=sequence.timings(),
                text=text,
                logprobs=tuple(sequence.held_logprobs),
                context=context,
            )
        )

    def _leave(self, sequence: Sequence, *, keeps_prefix: bool = True) -> None:
        """Take a running sequence out of its slot."""
        self._running.remove(sequence)
        self._is_crowded = False
        if keeps_prefix:
            self._cache.release(sequence.seq_id)
        else:
            self._cache.drop(sequence.seq_id)
        if sequence.sampler is not None:
            sequence.sampler.close()
        sequence.move("finish")
        mark = self._stream_marks.pop(sequence.uid, None)
        if mark is not None and self.model.stream is not None:
            # Requests that run at once read for each other: each one's line has what all read.
            logger.info("uid %d: %s", sequence.uid, self.model.stream.describe_since(mark))

    def _fail(self, uid: int, error: EngineError) -> None:
        self._events.append(
            Failed(
                uid=uid,
                kind=type(error).__name__,
                status=error.status,
                message=str(error),
                n_prompt=getattr(error, "n_prompt", 0),
                n_ctx=getattr(error, "n_ctx", 0),
            )
        )
