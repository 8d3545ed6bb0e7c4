"""Plain llama.cpp: the loop that the engine is compared with. Decodes greedily, nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as c
import numpy as np


class BareLoop:
    """llama_decode and an argmax over a model that is loaded already."""

    def __init__(
        self, model: Any, n_sequences: int, *, n_ctx: int = 4096, n_threads: int = 2
    ) -> None:
        params = c.llama_context_default_params()
        params.n_ctx = n_ctx * n_sequences
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = n_sequences
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified = True
        params.swa_full = True
        params.no_perf = True
        self._ctx = c.llama_init_from_model(model, params)
        self._batch = c.llama_batch_init(512, 0, 1)
        self._n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def run(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> tuple[list[list[int]], float]:
        """Return n_tokens greedy tokens for each prompt, and the seconds of decode alone."""
        answers = [[self._prefill(i, prompt)] for i, prompt in enumerate(prompts)]
        started = time.perf_counter()
        for step in range(n_tokens - 1):
            for i, answer in enumerate(answers):
                self._put(i, answer[-1], len(prompts[i]) + step, i, True)
            self._batch.n_tokens = len(answers)
            assert c.llama_decode(self._ctx, self._batch) == 0
            for i, answer in enumerate(answers):
                answer.append(self._best(i))
        return answers, time.perf_counter() - started

    def clear(self) -> None:
        c.llama_memory_clear(c.llama_get_memory(self._ctx), False)

    def close(self) -> None:
        c.llama_batch_free(self._batch)
        c.llama_free(self._ctx)

    def _prefill(self, seq_id: int, prompt: Sequence[int]) -> int:
        for first in range(0, len(prompt), 512):
            chunk = prompt[first : first + 512]
            for i, token in enumerate(chunk):
                self._put(i, token, first + i, seq_id, first + i == len(prompt) - 1)
            self._batch.n_tokens = len(chunk)
            assert c.llama_decode(self._ctx, self._batch) == 0
        return self._best(self._batch.n_tokens - 1)

    def _put(self, i: int, token: int, position: int, seq_id: int, wants_logits: bool) -> None:
        batch = self._batch
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
        batch.seq_id[i][0], batch.logits[i] = seq_id, wants_logits

    def _best(self, i: int) -> int:
        pointer = c.llama_get_logits_ith(self._ctx, i)
        return int(np.ctypeslib.as_array(pointer, shape=(self._n_vocab,)).argmax())
