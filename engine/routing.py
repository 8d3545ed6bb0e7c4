"""How a router's choices repeat: the hit rate of an expert cache, and what a batch touches.

In: how often each expert was chosen, or only how many there are. Out: a Routing, which knows the
share of choices that an LRU cache of so many experts holds. Pure arithmetic; knows no bytes.

The cache is taken for a window over the last tokens (Che's approximation of LRU): it holds what
the last T tokens used, T being as long as that fits. A choice hits if the expert was used in that
window. By Denning and Schwartz (Properties of the working-set model, CACM 1972) the window's size
and its misses determine each other, so both follow from the distances at which experts return:
a share of the choices, the locality, goes to experts used a few tokens ago; the others are drawn
by popularity, as if tokens were independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Fitted to 21 published hit rates of LRU and LFRU caches of eight models (2 to 50 % of 64 to 896
# experts): off by 5.9 points (root mean square), two by 9 and more: OLMoE with half of its
# experts by 21. Left out: 13 % with 4.5 % of DeepSeek-V4's on long Chinese text, here 38 %.
# Of Qwen3-30B's choices 45 and 80 % were seen to return within 1 and 8 tokens; here 29 and 75.
_ZIPF_EXPONENT = 1.1
_LOCALITY = 0.4
# The chance that a local choice goes to what the token before used: 2.9 tokens on average.
_RETURN = 0.35
_MAX_LOCALITY = 0.95
# Of a curve: windows from one token to so many, each a third longer than the one before.
_LONGEST_WINDOW, _CURVE_POINTS = 1 << 24, 61


@dataclass(frozen=True, slots=True, eq=False)
class ExpertUsage:
    """What was learnt of a model's router while it ran."""

    counts: tuple[npt.NDArray[np.int64], ...]
    """(n_experts,) for each block with experts, in order: how often each was chosen."""
    cached_share: float = 0.0
    """Of all experts, while hit_rate was measured; 0: it was not."""
    hit_rate: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class HitCurve:
    """The hit rate of an LRU cache by its size."""

    n_records: Array
    """(n_points,), increasing; the last is all experts."""
    rates: Array

    def hit_rate(self, n_records: Array | float) -> Array:
        """Return the share of one token's choices that a cache of n_records holds."""
        rates = np.interp(n_records, self.n_records, self.rates, left=0.0)
        return np.asarray(rates, dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The choices of the routers of n_blocks blocks that are alike."""

    n_blocks: int
    popularity: Array
    """(n_blocks, n_experts), or (1, n_experts) for all: the chance that a token uses an expert."""
    locality: float = _LOCALITY

    @classmethod
    def prior(cls, n_blocks: int, n_experts: int, n_used: int) -> Routing:
        """Return what is likely of a model of which nothing was learnt."""
        weights: Array = np.arange(1, n_experts + 1, dtype=np.float64) ** -_ZIPF_EXPONENT
        return cls(n_blocks, _chances(weights[np.newaxis], n_used))

    @classmethod
    def learnt(cls, usage: ExpertUsage, blocks: Sequence[int], n_used: int) -> Routing:
        """Return the routing of blocks, which are places in usage.counts."""
        counts = np.stack([usage.counts[block] for block in blocks])
        # Half a choice more for each: one that was never chosen may be, some day.
        routing = cls(len(blocks), _chances(np.float64(0.5) + counts, n_used))
        if usage.cached_share <= 0:
            return routing
        n_records = usage.cached_share * routing.n_experts
        low, high = 0.0, _MAX_LOCALITY
        for _ in range(20):
            routing = replace(routing, locality=(low + high) / 2)
            if routing.hit_rate(n_records) < usage.hit_rate:
                low = routing.locality
            else:
                high = routing.locality
        return routing

    @property
    def n_experts(self) -> int:
        """Experts of all blocks together."""
        return self.n_blocks * int(self.popularity.shape[1])

    @property
    def n_used(self) -> float:
        """Experts that a token uses in one block."""
        return float(self.popularity[0].sum())

    def hit_rate(self, n_records: float) -> float:
        """Return the share of one token's choices that an LRU cache of n_records holds.

        With less than one token uses it is 0: each expert is evicted before its next use.
        """
        if round(n_records) >= self.n_experts:
            return 1.0
        low = 1.0
        if n_records < round(self.n_distinct(low)):
            return 0.0
        while self.n_distinct(2 * low) < n_records:
            low *= 2
        high = 2 * low
        for _ in range(30):
            middle = (low + high) / 2
            if self.n_distinct(middle) < n_records:
                low = middle
            else:
                high = middle
        # What the window no longer covers goes in the course of a token: in its middle, on average.
        return self._hit_rate_within(max(low - 0.5, 1.0))

    def hit_curve(self) -> HitCurve:
        """Return hit_rate for all sizes of the cache, at points that are straight lines apart."""
        windows = np.geomspace(1, _LONGEST_WINDOW, _CURVE_POINTS)
        sizes = [self.n_distinct(window) for window in windows]
        rates = [self._hit_rate_within(max(window - 0.5, 1.0)) for window in windows]
        return HitCurve(np.array([*sizes, self.n_experts]), np.array([*rates, 1.0]))

    def n_distinct(self, n_tokens: float) -> float:
        """Return how many experts n_tokens successive tokens use, all blocks together."""
        local, others = self._used_within(n_tokens)
        # What local choices hold at once, and what the others do.
        of_local = self.locality * self.n_used * local / self._return_chance
        of_others = (1 - self.locality) * float(others.sum(axis=1).mean()) / self._pace
        return self.n_blocks * (of_local + of_others)

    def _hit_rate_within(self, n_tokens: float) -> float:
        local, others = self._used_within(n_tokens)
        of_others = float((self.popularity * others).sum() / self.popularity.sum())
        return self.locality * local + (1 - self.locality) * of_others

    def _used_within(self, n_tokens: float) -> tuple[float, Array]:
        """Return the chances that an expert was used within n_tokens: a local one, and each."""
        local = 1 - math.pow(1 - self._return_chance, n_tokens)
        return local, 1 - (1 - self._pace * self.popularity) ** n_tokens

    @property
    def _share(self) -> float:
        return self.n_used / int(self.popularity.shape[1])

    @property
    def _return_chance(self) -> float:
        """Of a local choice to be that of the token before; no expert is rarer than by chance."""
        return max(_RETURN, self._share)

    @property
    def _pace(self) -> float:
        """How much slower than by popularity the others return.

        On average an expert returns after n_experts / n_used tokens, whatever the order: what
        local choices return sooner the others return later.
        """
        sooner = self._share / self._return_chance
        return (1 - self.locality) / (1 - self.locality * sooner)


def _chances(weights: Array, n_used: int) -> Array:
    """Return weights, (n_blocks, n_experts), as chances to be one of n_used in each row."""
    chances: Array = weights * (n_used / weights.sum(axis=1, keepdims=True))
    while (chances > 1 + 1e-9).any():  # then others are likelier than their weights say
        is_sure = chances >= 1
        rest = np.where(is_sure, 0, chances)
        left = n_used - is_sure.sum(axis=1, keepdims=True)
        total = np.maximum(rest.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
        chances = np.where(is_sure, 1, rest * left / total)
    return np.minimum(chances, 1.0)
