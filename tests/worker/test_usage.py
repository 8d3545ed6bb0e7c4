"""What a streamed model learns of its experts, and what the next run does with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import streamed
from streamed import Case

from headrace.engine import gguf
from headrace.engine.routing import ExpertUsage
from headrace.engine.tensors import read_tensors
from headrace.engine.usage import keep_usage, read_usage, usage_path

Built = Callable[[str], Path]


def used(path: Path, usage: ExpertUsage | None = None) -> tuple[ExpertUsage, streamed.Logits, int]:
    """Return what a short run teaches, its logits, and the experts that had to be read."""
    made = streamed.plan(path, 0.5)
    model = streamed.load(path, made, Case(0.5, lookahead=0))
    assert model.stream is not None
    if usage is not None:
        model.stream.expect(usage)
        while model.stream.fill():
            pass
    evaluation = streamed.Evaluation(model, made.n_ubatch)
    evaluation.prefill([5])
    token = int(evaluation.logits[-1].argmax())
    for i in range(1, 24):
        before = model.stream.stats()
        token = evaluation.decode({0: i}, {0: token})[0]
        model.stream.learn(before)
    learnt = model.stream.usage()
    n_misses = model.stream.stats().n_misses
    evaluation.close()
    model.close()
    assert learnt is not None
    return learnt, np.array(evaluation.logits), n_misses


@pytest.mark.parametrize("name", ["qwen3moe", "mixed_moe"])
def test_what_was_used_most_is_read_before_it_is_asked_for(name: str, built: Built) -> None:
    path = built(name)
    learnt, logits, n_misses = used(path)
    table = read_tensors(gguf.read_model(path))
    assert [len(counts) for counts in learnt.counts] == [b.n_experts for b in table.experts]
    # A token uses so many experts in each block, and so do all 24.
    assert {int(counts.sum()) for counts in learnt.counts} == {24 * table.n_used}
    assert 0 < learnt.hit_rate < 1
    _, again, n_misses_again = used(path, learnt)
    assert np.array_equal(again, logits)
    assert n_misses_again < n_misses


def test_usage_is_kept_halved_and_forgotten_for_another_model(built: Built) -> None:
    header, other = gguf.read_model(built("qwen3moe")), gguf.read_model(built("mixtral"))
    blocks = read_tensors(header).experts
    assert read_usage(header, blocks) is None
    counts = tuple(np.arange(block.n_experts) for block in blocks)
    usage = ExpertUsage(counts, 0.5, 0.75)
    keep_usage(header, usage, None)
    kept = read_usage(header, blocks)
    assert kept is not None
    assert (kept.cached_share, kept.hit_rate) == (0.5, 0.75)
    assert np.array_equal(kept.counts, counts)
    keep_usage(header, usage, kept)
    twice = read_usage(header, blocks)
    assert twice is not None
    assert np.array_equal(twice.counts[0], counts[0] + counts[0] // 2)
    assert read_usage(other, read_tensors(other).experts) is None
    usage_path(header).write_bytes(b'{"version": 1, "coun')
    assert read_usage(header, blocks) is None
