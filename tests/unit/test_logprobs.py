"""Log probabilities are those of the softmax over all logits, best first."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.engine.logprobs import token_logprob

logits = arrays.arrays(
    np.float32, st.integers(1, 50), elements=st.floats(-1e4, 1e4, width=32)
)  # fmt: skip


def spell(token: int) -> bytes:
    return b"token %d" % token


@given(logits, st.data())
def test_all_probabilities_add_up_to_one_and_come_best_first(
    logits: np.typing.NDArray[np.float32], data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    found = token_logprob(logits, token, len(logits), spell)
    values = [value for _, value in found.top]
    assert math.fsum(map(math.exp, values)) == pytest.approx(1)
    assert values == sorted(values, reverse=True)
    assert {piece for piece, _ in found.top} == {spell(i) for i in range(len(logits))}
    assert dict(found.top)[spell(token)] == found.logprob
    assert found.piece == spell(token)


def test_only_the_best_alternatives_are_named() -> None:
    logits = np.array([0.0, 3.0, 1.0, 2.0], np.float32)
    found = token_logprob(logits, 0, 2, spell)
    assert [piece for piece, _ in found.top] == [spell(1), spell(3)]


def test_no_alternatives_are_named_when_none_are_wanted() -> None:
    logits = np.zeros(4, np.float32)
    found = token_logprob(logits, 2, 0, spell)
    assert found.top == ()
    assert found.logprob == pytest.approx(math.log(1 / 4))


def test_the_logits_are_left_as_they_are() -> None:
    logits = np.array([5.0, 1.0], np.float32)
    token_logprob(logits, 0, 1, spell)
    assert logits.tolist() == [5.0, 1.0]
