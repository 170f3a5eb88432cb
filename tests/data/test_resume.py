"""A run may stop anywhere and go on with other ranks; what would change its data is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.data import BucketBatchSampler, Schedule
from megapack.errors import ConfigError, ResumeError
from tests.data.corpora import packed_index

INDEX = packed_index(500, (16, 32, 64))
OTHER = packed_index(500, (16, 32, 64), seed=1)
TOKENS = 64 * 12


def consumed(
    schedule: Schedule, state: dict[str, Any] | None, size: int, micro: int, num_steps: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """Sample ids of some steps, all ranks together, and the state afterwards, through JSON."""
    start = 0 if state is None else schedule.resume_step(json.loads(json.dumps(state)))
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for rank in range(size):
        for batch in BucketBatchSampler(
            schedule,
            data_parallel_rank=rank,
            data_parallel_size=size,
            micro_batch_tokens=micro,
            start_step=start,
            num_steps=num_steps,
        ):
            steps[batch.step - start].extend(batch)
    return [sorted(ids) for ids in steps], schedule.state_dict(start + num_steps)


@given(
    order=st.sampled_from(["proportional", "grow-p2", "uniform"]),
    cost_window=st.sampled_from([1, 3]),
    legs=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([64, 128]), st.integers(0, 9)
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_chains_are_one_run(order: str, cost_window: int, legs: list[tuple[int, int, int]]) -> None:
    def fresh() -> Schedule:  # every leg is a new process
        return Schedule(INDEX, tokens_per_step=TOKENS, order=order, cost_window=cost_window)

    found: list[list[int]] = []
    state = None
    for size, micro, num_steps in legs:
        if TOKENS // micro % size:
            continue
        steps, state = consumed(fresh(), state, size, micro, num_steps)
        found += steps
    uninterrupted, _ = consumed(fresh(), None, 1, 64, len(found))
    assert found == uninterrupted


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("seed", {"seed": 1}),
    ("tokens_per_step", {"tokens_per_step": 2 * TOKENS}),
    ("order", {"order": "uniform"}),
    ("num_cycles", {"num_cycles": 2}),
    ("cost_window", {"cost_window": 2}),
    ("row_tokens", {"row_tokens": 64}),
    ("mix, micro_step_tokens", {"mix": "micro_step", "micro_step_tokens": TOKENS // 2}),
]


@pytest.mark.parametrize(("fields", "change"), CHANGES)
def test_change_of_order_is_refused_or_allowed(fields: str, change: dict[str, Any]) -> None:
    state = Schedule(INDEX, tokens_per_step=TOKENS).state_dict(10)
    changed = Schedule(INDEX, **{"tokens_per_step": TOKENS, **change})
    with pytest.raises(ResumeError) as refused:
        changed.check_state(state)
    assert f"allow_change=({fields})" in str(refused.value)
    for name in fields.split(", "):
        assert f"{name} was {state[name]!r} and is {change[name]!r}" in str(refused.value)
    texts = changed.check_state(state, allow_change=fields.split(", "))
    assert len(texts) == len(fields.split(", ")) and all(": " in text for text in texts)


def test_other_data_and_other_weights_are_refused() -> None:
    state = Schedule(INDEX, tokens_per_step=TOKENS).state_dict(3)
    with pytest.raises(ResumeError, match="indices was"):
        Schedule(OTHER, tokens_per_step=TOKENS).check_state(state)
    state = Schedule([INDEX, OTHER], weights=[1, 2], tokens_per_step=TOKENS).state_dict(3)
    with pytest.raises(ResumeError, match="weights was"):
        Schedule([INDEX, OTHER], weights=[1, 3], tokens_per_step=TOKENS).check_state(state)
    with pytest.raises(ResumeError, match="indices was"):
        Schedule([OTHER, INDEX], weights=[1, 2], tokens_per_step=TOKENS).check_state(state)
    same = Schedule([INDEX, OTHER], weights=[1, 2], tokens_per_step=TOKENS)
    assert same.check_state(state) == []


def test_a_state_of_an_older_order_of_samples_is_refused_with_what_to_do() -> None:
    schedule = Schedule([INDEX, OTHER], weights=[1, 2], tokens_per_step=TOKENS)
    old = {**schedule.state_dict(3), "order_version": 1}
    message = "order_version was 1 and is 3. Continue with the version of megapack that began"
    with pytest.raises(ResumeError, match=message):
        schedule.check_state(old)
    [text] = schedule.check_state(old, allow_change=["order_version"])
    assert "another version of megapack orders samples differently" in text


def test_a_loader_may_stop_amid_a_step_but_not_change_its_ranks_there() -> None:
    def sampler(size: int, micro: int) -> BucketBatchSampler:
        schedule = Schedule(INDEX, tokens_per_step=TOKENS)
        return BucketBatchSampler(
            schedule, data_parallel_rank=0, data_parallel_size=size, micro_batch_tokens=micro
        )

    begun = iter(sampler(2, 128))
    whole = [batch.sample_ids.tolist() for batch in sampler(2, 128)]
    next(begun)
    state = json.loads(json.dumps(begun.state_dict()))
    same = iter(sampler(2, 128))
    same.load_state_dict(state)
    assert [batch.sample_ids.tolist() for batch in same] == whole[1:]
    with pytest.raises(ResumeError, match="micro step 1 of a step dealt with"):
        iter(sampler(4, 64)).load_state_dict(state)  # as many micro steps, other samples
    for _ in range(sampler(2, 128).num_micro_steps(0) - 1):
        next(begun)
    other = iter(sampler(4, 64))
    other.load_state_dict(begun.state_dict())
    assert next(other).step == 1


def test_another_step_size_continues_at_the_tokens_seen() -> None:
    state = Schedule(INDEX, tokens_per_step=TOKENS).state_dict(11)
    larger = Schedule(INDEX, tokens_per_step=2 * TOKENS)
    assert larger.resume_step(state, allow_change=["tokens_per_step"]) == 5
    with pytest.raises(ConfigError, match="unknown field 'sed'; did you mean 'seed'"):
        larger.resume_step(state, allow_change=["sed"])


def test_the_state_is_a_handful_of_plain_values() -> None:
    state = Schedule(INDEX, tokens_per_step=TOKENS).state_dict(7)
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 400
    assert state["step"] == 7
