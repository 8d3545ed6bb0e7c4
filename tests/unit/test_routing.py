"""How often an expert cache hits: against a simulated LRU cache, theory, and published figures."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.routing import Array, ExpertUsage, Routing

# Experts of a block, used by a token, share that is cached, hits: what others measured of
# Qwen3-30B, Gemma 4 26B, gpt-oss-120b, DeepSeek-V4-Flash, Kimi-Linear and Kimi K3.
PUBLISHED = [
    (128, 6, 0.18, 0.71), (128, 6, 0.24, 0.80), (128, 8, 0.40, 0.92), (128, 6, 0.21, 0.73),
    (128, 6, 0.28, 0.82), (128, 2, 0.05, 0.45), (256, 6, 0.094, 0.69), (256, 6, 0.156, 0.75),
    (256, 6, 0.227, 0.80), (256, 8, 0.06, 0.40), (256, 8, 0.12, 0.62), (256, 8, 0.24, 0.85),
    (256, 8, 0.48, 0.94), (896, 16, 0.024, 0.28), (896, 16, 0.031, 0.38),
]  # fmt: skip


def independent(popularity: Array, n_blocks: int) -> Routing:
    return Routing(n_blocks, popularity[np.newaxis], locality=0.0)


def skewed(n_experts: int, n_used: int) -> Array:
    """Return chances that fall from expert to expert, n_used in sum."""
    chances: Array = np.linspace(2.0, 0.05, n_experts)
    chances *= n_used / chances.sum()
    return chances


def simulated_hit_rate(
    popularity: Array, n_blocks: int, n_records: int, n_tokens: int = 4000
) -> float:
    """Return the hits of an LRU cache while tokens choose experts with these chances."""
    random = np.random.default_rng(3)
    ends = np.cumsum(popularity)
    n_used = round(float(ends[-1]))
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = choices = 0
    for token in range(n_tokens):
        for block in range(n_blocks):
            # Systematic sampling: n_used different experts, each with its own chance.
            chosen = np.searchsorted(ends, random.random() + np.arange(n_used) - 1e-12)
            for key in ((block, int(expert)) for expert in chosen):
                is_hit = key in cache
                cache[key] = None
                cache.move_to_end(key)
                if len(cache) > n_records:
                    cache.popitem(last=False)
                if token >= n_tokens // 4:
                    hits, choices = hits + is_hit, choices + 1
    return hits / choices


@pytest.mark.parametrize("n_records", [40, 80, 140])
def test_an_lru_cache_hits_as_often_as_predicted(n_records: int) -> None:
    popularity = skewed(48, 4)
    predicted = independent(popularity, 4).hit_rate(n_records)
    assert predicted == pytest.approx(simulated_hit_rate(popularity, 4, n_records), abs=0.02)


def test_of_choices_that_are_all_alike_about_the_cached_share_hits() -> None:
    routing = independent(np.full(256, 8 / 256), 10)
    for share in (1 / 32, 0.1, 0.4, 0.9):
        assert routing.hit_rate(share * routing.n_experts) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("n_experts", "n_used", "share", "hit_rate"), PUBLISHED)
def test_the_prior_is_near_what_others_measured(
    n_experts: int, n_used: int, share: float, hit_rate: float
) -> None:
    routing = Routing.prior(20, n_experts, n_used)
    assert routing.hit_rate(share * routing.n_experts) == pytest.approx(hit_rate, abs=0.08)


def test_less_than_one_tokens_experts_never_hit_and_all_of_them_always_do() -> None:
    routing = Routing.prior(24, 128, 8)
    assert routing.hit_rate(24 * 8 - 1) == 0
    assert routing.hit_rate(24 * 8) > 0.2
    assert routing.hit_rate(24 * 128) == 1


@settings(max_examples=60, deadline=None)
@given(
    n_experts=st.integers(2, 300), n_used=st.integers(1, 16), n_blocks=st.integers(1, 60),
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=2),
)  # fmt: skip
def test_a_larger_cache_never_hits_less(
    n_experts: int, n_used: int, n_blocks: int, shares: list[float]
) -> None:
    routing = Routing.prior(n_blocks, n_experts, min(n_used, n_experts))
    low, high = (routing.hit_rate(share * routing.n_experts) for share in sorted(shares))
    assert 0 <= low <= high + 1e-6 and high <= 1


def test_a_batch_uses_one_tokens_experts_at_least_and_all_at_most() -> None:
    routing = Routing.prior(10, 128, 8)
    distinct = [routing.n_distinct(n) for n in (1, 2, 16, 512, 10**9)]
    assert distinct[0] == pytest.approx(80)
    assert distinct == sorted(distinct)
    assert distinct[1] < 160
    assert distinct[-1] == pytest.approx(1280)


def test_learnt_counts_that_are_skewed_hit_more_than_even_ones() -> None:
    even = ExpertUsage((np.full(64, 1000),) * 2)
    few = ExpertUsage((np.r_[np.full(12, 5000), np.full(52, 80)],) * 2)
    rates = [Routing.learnt(usage, [0, 1], 8).hit_rate(40) for usage in (even, few)]
    assert rates[1] > rates[0] + 0.2


def test_an_expert_that_was_never_chosen_may_still_be() -> None:
    usage = ExpertUsage((np.r_[np.full(8, 1000), np.zeros(56, dtype=np.int64)],))
    routing = Routing.learnt(usage, [0], 8)
    assert routing.n_used == pytest.approx(8)
    assert 0 < routing.popularity[0, -1] < 0.001


def test_a_hit_rate_that_was_measured_is_predicted_again() -> None:
    counts = (np.round(1e5 * skewed(96, 8)).astype(np.int64),) * 3
    usage = ExpertUsage(counts, cached_share=0.3, hit_rate=0.71)
    routing = Routing.learnt(usage, range(3), 8)
    assert routing.hit_rate(0.3 * 3 * 96) == pytest.approx(0.71, abs=0.005)
    assert routing.hit_rate(0.5 * 3 * 96) > 0.75
