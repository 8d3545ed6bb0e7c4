"""Streamed models against the same models resident: every logit, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import streamed
import streaming_models
from streamed import Case

from headrace.engine import gguf, llama, placement
from headrace.engine.errors import ModelUnusable
from headrace.engine.tensors import read_tensors

Built = Callable[[str], Path]
LRU, LFU, MRU, LRFU = range(4)


@pytest.fixture(scope="module")
def resident(built: Built) -> Callable[..., streamed.Logits]:
    """Return the logits of a resident model, evaluated once for each name and way to evaluate."""

    @cache
    def evaluate(
        name: str, n_ubatch: int, run: Callable[..., streamed.Logits] = streamed.run
    ) -> streamed.Logits:
        model = llama.Model(built(name), repacks=False)
        logits = run(model, n_ubatch)
        model.close()
        assert np.isfinite(logits).all()
        return logits

    return evaluate


def streamed_logits(
    path: Path, case: Case, run: Callable[..., streamed.Logits] = streamed.run
) -> tuple[streamed.Logits, int]:
    made = streamed.plan(path, case.share)
    model = streamed.load(path, made, case)
    logits = run(model, made.n_ubatch)
    model.close()
    return logits, made.n_ubatch


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
@pytest.mark.parametrize("name", streaming_models.SHAPES)
def test_logits_equal_the_resident_models_bit_for_bit(
    name: str, share: float, built: Built, resident: Callable[..., streamed.Logits]
) -> None:
    logits, n_ubatch = streamed_logits(built(name), Case(share))
    assert np.array_equal(logits, resident(name, n_ubatch))


@pytest.mark.parametrize("name", ["dense", "mixtral", "k_dense"])
def test_what_stays_in_memory_as_a_whole_is_loaded_directly_too(
    name: str, built: Built, resident: Callable[..., streamed.Logits]
) -> None:
    header = gguf.read_model(built(name))
    made = placement.plan_weights(
        header, read_tensors(header), mode="full-resident", budget_bytes=1 << 40, kv_bytes=0,
        n_batch=streamed.N_BATCH, n_slots=4,
    )  # fmt: skip
    model = streamed.load(built(name), made, Case(1))
    assert model.stream is None  # nothing is left of it
    logits = streamed.run(model, made.n_ubatch)
    model.close()
    assert np.array_equal(logits, resident(name, made.n_ubatch))


@pytest.mark.parametrize(
    ("name", "share"), [("dense", 0.6), ("mixed_dense", 0.6), ("mixtral", 0.3), ("k_dense", 0.6)]
)
def test_what_is_resident_may_be_repacked_as_in_the_resident_model(
    name: str, share: float, built: Built, resident: Callable[..., streamed.Logits]
) -> None:
    made = streamed.plan(built(name), share)
    model = streamed.load(built(name), made, Case(share, repacks=True))
    assert model.stream is not None
    patterns = model.stream.patterns
    logits = streamed.run(model, made.n_ubatch)
    model.close()
    plain = streamed.plain_buffer_type()
    model = llama.Model(built(name), overrides=[(pattern, plain) for pattern in patterns])
    expected = streamed.run(model, made.n_ubatch)
    model.close()
    assert np.array_equal(logits, expected)
    if name == "dense":  # and it makes a difference: there are kernels for repacked Q4_0
        assert not np.array_equal(logits, resident(name, made.n_ubatch))


@pytest.mark.parametrize("name", ["mixed_dense", "mixtral", "qwen3moe", "mixed_moe", "biased_moe"])
def test_several_sequences_at_once_get_the_resident_models_logits(
    name: str, built: Built, resident: Callable[..., streamed.Logits]
) -> None:
    logits, n_ubatch = streamed_logits(built(name), Case(0.2), streamed.run_several)
    assert np.array_equal(logits, resident(name, n_ubatch, streamed.run_several))


@pytest.mark.parametrize("policy", [LRU, LFU, MRU])
@pytest.mark.parametrize("name", ["mixtral", "mixed_moe"])
def test_what_is_evicted_changes_no_logit(
    name: str, policy: int, built: Built, resident: Callable[..., streamed.Logits]
) -> None:
    logits, n_ubatch = streamed_logits(built(name), Case(0.4, policy=policy))
    assert np.array_equal(logits, resident(name, n_ubatch))


@pytest.mark.parametrize("name", ["dense", "qwen3moe"])
def test_buffered_reads_give_the_same_logits(
    name: str, built: Built, resident: Callable[..., streamed.Logits]
) -> None:
    logits, n_ubatch = streamed_logits(built(name), Case(0.3, direct=False))
    assert np.array_equal(logits, resident(name, n_ubatch))


def test_two_models_stream_in_one_process_in_turns(
    built: Built, resident: Callable[..., streamed.Logits]
) -> None:
    names = ("dense", "qwen3moe")
    plans = [streamed.plan(built(name), 0.2) for name in names]
    models = [
        streamed.load(built(name), made, Case(0.2)) for name, made in zip(names, plans, strict=True)
    ]
    evaluations = [
        streamed.Evaluation(model, made.n_ubatch) for model, made in zip(models, plans, strict=True)
    ]
    for i in range(12):
        for evaluation in evaluations:
            evaluation.prefill(streamed.PROMPT[i : i + 1], first=i)
    for name, made, evaluation in zip(names, plans, evaluations, strict=True):
        model = llama.Model(built(name), repacks=False)
        alone = streamed.Evaluation(model, made.n_ubatch)
        for i in range(12):
            alone.prefill(streamed.PROMPT[i : i + 1], first=i)
        assert np.array_equal(alone.logits, evaluation.logits)
        alone.close()
        model.close()
        evaluation.close()
    for model in models:
        model.close()


@pytest.mark.parametrize("name", ["dense", "aligned_moe", "split_moe"])
def test_streamed_weights_are_not_read_while_the_model_is_loaded(name: str, built: Built) -> None:
    path = built(name)
    made = streamed.plan(path, 0)
    model = streamed.load(path, made, Case(0))
    assert model.stream is not None
    read = model.stream.stats().bytes_read
    model.close()
    table = read_tensors(gguf.read_model(path))
    kept = table.trunk_bytes + table.dense_bytes + table.expert_bytes
    kept -= sum(tensor.n_bytes for tensor in made.streamed)
    n_resident = len(table.trunk) + len(table.dense)
    assert kept <= read <= kept + n_resident * 3 * 4096


def test_nothing_of_the_files_stays_open_or_mapped_after_close(built: Built) -> None:
    path = built("qwen3moe")
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    model = streamed.load(path, streamed.plan(path, 0.5), Case(0.5))
    streamed.run(model, 8, n_decode=2)
    model.close()
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert before == after
    assert path.name not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["dense", "qwen3moe"])
def test_a_budget_below_one_tokens_need_is_refused_with_the_numbers(
    name: str, built: Built
) -> None:
    header = gguf.read_model(built(name))
    table = read_tensors(header)
    with pytest.raises(
        ModelUnusable, match=r"needs [0-9.]+ MiB .* 0.9 MiB is there; raise --memory"
    ):
        placement.plan_weights(
            header, table, mode="auto", budget_bytes=900 << 10, kv_bytes=1 << 20, n_batch=64,
            n_slots=1,
        )  # fmt: skip


def test_a_real_model_with_sliding_windows_and_k_quants_gets_the_resident_models_logits(
    backend: None, gemma3_path: Path
) -> None:
    model = llama.Model(gemma3_path, repacks=False)
    resident = streamed.run(model, streamed.N_BATCH, n_decode=8)
    model.close()
    logits, n_ubatch = streamed_logits(gemma3_path, Case(0.5), partial(streamed.run, n_decode=8))
    assert n_ubatch == streamed.N_BATCH
    assert np.array_equal(logits, resident)


def test_a_moe_made_of_copies_streams_the_text_of_the_dense_model(
    backend: None, smollm2_path: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "copied.gguf"
    streaming_models.build_copied_experts(smollm2_path, copied, n_expert=4, n_used=2)
    made = streamed.plan(copied, 0.3)
    texts = []
    for model in (
        llama.Model(smollm2_path, repacks=False),
        streamed.load(copied, made, Case(0.3)),
    ):
        prompt = "<|im_start|>user\nWhat is the sea?<|im_end|>\n<|im_start|>assistant\n"
        tokens = model.vocab.tokenize(prompt, parses_control=True)
        evaluation = streamed.Evaluation(model, made.n_ubatch, n_threads=2)
        evaluation.prefill(tokens)
        token, text = int(evaluation.logits[-1].argmax()), b""
        for i in range(32):
            text += model.vocab.piece(token)
            token = evaluation.decode({0: len(tokens) + i}, {0: token})[0]
        evaluation.close()
        model.close()
        texts.append(text.decode())
    assert texts[0] == texts[1]
    assert len(set(texts[0].split())) > 8
