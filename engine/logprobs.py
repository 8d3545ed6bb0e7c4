"""Log probabilities of a sampled token and its alternatives, from raw logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.engine.messages import Logprob


def token_logprob(
    logits: npt.NDArray[np.float32], token: int, n_top: int, spell: Callable[[int], bytes]
) -> Logprob:
    """Return token's natural-log probability under logits, (n_vocab,) float32, with n_top others.

    These are the model's own probabilities, before temperature, penalties and cuts.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    best = np.argpartition(values, -n_top)[-n_top:] if n_top else np.empty(0, np.intp)
    order = best[np.argsort(-values[best], kind="stable")]
    top = tuple((spell(int(i)), float(values[i])) for i in order)
    return Logprob(spell(token), float(values[token]), top)
