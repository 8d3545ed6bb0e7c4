"""A step's plan: who decodes, whose prompt goes on, and by how much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.messages import Generate
from headrace.engine.scheduler import MAX_STALL_S, MIN_CHUNK, plan_step
from headrace.engine.sequence import Sequence, State


def sequence(n_tokens: int, n_past: int = 0, *, decodes: bool = False) -> Sequence:
    made = Sequence(Generate(uid=0, prompt=()), list(range(n_tokens)), 8192)
    made.move("admit")
    made.n_past = n_past
    if decodes:
        made.n_past = n_tokens - 1
        made.move("prefilled")
    return made


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    n_tokens = draw(st.integers(1, 3000))
    return sequence(n_tokens, draw(st.integers(0, n_tokens - 1)), decodes=draw(st.booleans()))


running = st.lists(sequences(), max_size=6)
batches = st.sampled_from([1, 32, 64, 100, 512])
speeds = st.floats(0, 1e6)


@given(running, batches, speeds, st.booleans())
def test_every_decoding_sequence_and_the_first_prompt_take_part(
    running: list[Sequence], n_batch: int, speed: float, snapshots: bool
) -> None:
    plan = plan_step(running, n_batch, speed, snapshots=snapshots)
    assert list(plan.decode) == [s for s in running if s.state is State.DECODE]
    prompts = [s for s in running if s.state is State.PREFILL]
    assert plan.prefill is (prompts[0] if prompts else None)


@given(running, batches, speeds, st.booleans())
def test_a_chunk_is_never_empty_and_fits_batch_and_prompt(
    running: list[Sequence], n_batch: int, speed: float, snapshots: bool
) -> None:
    plan = plan_step(running, n_batch, speed, snapshots=snapshots)
    if plan.prefill is None:
        assert plan.n_prefill == 0
    else:
        assert 1 <= plan.n_prefill <= min(n_batch, plan.prefill.n_unevaluated)


@given(
    st.integers(1, 3000), st.sampled_from([64, 128, 512]), st.lists(speeds, min_size=1, max_size=4),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_prompt_is_evaluated_once_in_chunks_that_end_at_multiples_of_the_smallest(
    n_tokens: int, n_batch: int, speeds: list[float], has_company: bool, snapshots: bool
) -> None:
    prompt, others = sequence(n_tokens), [sequence(5, decodes=True)] if has_company else []
    ends: list[int] = []
    while prompt.n_unevaluated:
        speed = speeds[len(ends) % len(speeds)]
        plan = plan_step([*others, prompt], n_batch, speed, snapshots=snapshots)
        prompt.n_past += plan.n_prefill
        ends.append(prompt.n_past)
    smallest = min(n_batch // 4 if snapshots else n_batch, MIN_CHUNK)
    assert ends[-1] == n_tokens
    assert all(end % smallest == 0 for end in ends[:-1])


def test_a_prompt_alone_gets_the_whole_batch() -> None:
    assert plan_step([sequence(2000)], 512, 10.0, snapshots=False).n_prefill == 512


def test_the_first_chunk_after_a_reused_prefix_ends_at_a_multiple_of_its_size() -> None:
    assert plan_step([sequence(2000, 100)], 512, 10.0, snapshots=False).n_prefill == 412


def test_beside_running_answers_a_chunk_stalls_them_no_longer_than_wanted() -> None:
    running = [sequence(9, decodes=True), sequence(2000)]
    tokens_per_s = 200 / MAX_STALL_S
    assert plan_step(running, 512, tokens_per_s, snapshots=False).n_prefill == 128


def test_beside_running_answers_a_chunk_keeps_a_least_size() -> None:
    running = [sequence(9, decodes=True), sequence(2000)]
    assert plan_step(running, 512, 1.0, snapshots=False).n_prefill == MIN_CHUNK


def test_states_that_can_not_be_cut_get_several_snapshots_a_batch() -> None:
    assert plan_step([sequence(2000)], 512, 0.0, snapshots=True).n_prefill == 128


def test_nothing_running_is_nothing_to_do() -> None:
    plan = plan_step([], 512, 0.0, snapshots=False)
    assert (plan.decode, plan.prefill, plan.n_prefill) == ((), None, 0)
