"""What would make a model fit that does not: flags, and what it needs with each.

In: a Load, and a function that says what a Load needs. Out: Remedies. Pure; makes no plan itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from headrace.engine.messages import Load
from headrace.engine.plan import format_mib

# Shorter contexts that are worth a proposal, in tokens.
_CONTEXTS = (32768, 16384, 8192, 4096, 2048, 1024, 512)
_SMALL_KV_TYPE = "q8_0"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Flags, and the least memory that a plan takes with them."""

    flags: str
    needed_bytes: int


def find_remedies(
    load: Load, n_ctx_train: int, budget_bytes: int, needed_bytes: Callable[[Load], int]
) -> tuple[Remedy, ...]:
    """Return the flags that make a model fit budget_bytes; if none does, all that need less."""
    needed = needed_bytes(load)
    others = [Remedy(flags, needed_bytes(other)) for flags, other in _others(load, n_ctx_train)]
    fitting = [remedy for remedy in others if remedy.needed_bytes <= budget_bytes]
    found: dict[str, Remedy] = {}
    # Of contexts the longest that fits, else the shortest: they come in that order.
    for remedy in fitting or [r for r in reversed(others) if r.needed_bytes < needed]:
        found.setdefault(_names(remedy.flags), remedy)
    single = {names: remedy for names, remedy in found.items() if " " not in names}
    order = {remedy.flags: i for i, remedy in enumerate(others)}
    chosen = (single if fitting else None) or found
    return tuple(sorted(chosen.values(), key=lambda remedy: order[remedy.flags]))


def describe_remedies(remedies: tuple[Remedy, ...], budget_bytes: int) -> str:
    """Return remedies as the end of a sentence that says to raise the memory."""
    if not remedies:
        return ""
    shown = ", ".join(f"{other.flags} ({format_mib(other.needed_bytes)})" for other in remedies)
    if all(remedy.needed_bytes > budget_bytes for remedy in remedies):
        return f"; less is needed, but still too much, with {shown}"
    return f", or use what needs less: {shown}"


def _others(load: Load, n_ctx_train: int) -> Iterator[tuple[str, Load]]:
    """Yield flags, and load as they would change it."""
    n_ctx = min(load.n_ctx, n_ctx_train or load.n_ctx)
    shorter = [n for n in _CONTEXTS if n < n_ctx]
    for n in shorter:
        yield f"--context {n}", msgspec.structs.replace(load, n_ctx=n)
    if load.kv_type != _SMALL_KV_TYPE:
        cache = f"--kv-cache-type {_SMALL_KV_TYPE}"
        small = msgspec.structs.replace(load, kv_type=_SMALL_KV_TYPE)
        yield cache, small
    if load.n_slots > 1:
        yield "--parallel 1", msgspec.structs.replace(load, n_slots=1)
    if load.mode != "auto":
        yield "--mode auto", msgspec.structs.replace(load, mode="auto")
    if load.kv_type != _SMALL_KV_TYPE:
        for n in shorter:
            yield f"{cache} --context {n}", msgspec.structs.replace(small, n_ctx=n)


def _names(flags: str) -> str:
    """Return the names of flags without their values."""
    return " ".join(word for word in flags.split() if word.startswith("--"))
