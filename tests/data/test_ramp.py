"""A ramp: weights that follow a line or a cosine in pieces, with the bound that its page states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.config import from_dict, to_dict
from megapack.data import BlendConfig, Ramp, Schedule, Stage, plan_run
from megapack.data.program import ramp_pieces
from megapack.errors import ConfigError, ResumeError
from tests.data.corpora import samples_of_buckets

BIG = [samples_of_buckets({8: 300, 16: 100 + number}) for number in range(3)]
NAMES = ["web", "code", "math"]


def progress(shape: str, x: float) -> float:
    return x if shape == "linear" else (1 - math.cos(math.pi * x)) / 2


@given(
    shape=st.sampled_from(["linear", "cosine"]),
    pieces=st.integers(1, 40),
    begin=st.integers(1, 10**6),
    length=st.integers(1, 5000),
    weights=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=4).filter(
        lambda pairs: sum(a for a, _ in pairs) > 0.1 and sum(b for _, b in pairs) > 0.1
    ),
)
def test_pieces_have_the_mean_shares_of_their_steps(
    shape: Any, pieces: int, begin: int, length: int, weights: list[tuple[float, float]]
) -> None:
    before, after = ([pair[i] for pair in weights] for i in range(2))
    ramp = Ramp(until_step=begin + length, shape=shape, pieces=pieces)
    *found, last = ramp_pieces(ramp, begin, begin + length, before, after)
    assert last == (begin + length, tuple(after))
    starts = [start for start, _ in found] + [begin + length]
    assert starts[0] == begin and len(found) == min(pieces, length)
    assert max(np.diff(starts)) - min(np.diff(starts)) <= 1
    old, new = np.array(before) / sum(before), np.array(after) / sum(after)
    for (low, shares), high in zip(found, starts[1:], strict=True):
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        middles = low - begin + (np.arange(2000) + 0.5) / 2000 * (high - low)
        mean = np.mean([progress(shape, x / length) for x in middles.tolist()])
        assert np.allclose(shares, old + (new - old) * mean, atol=1e-7)


@pytest.mark.parametrize(("shape", "factor"), [("linear", 1.0), ("cosine", math.pi / 2)])
@pytest.mark.parametrize("pieces", [4, 32])
def test_draws_follow_the_ramp_within_the_bound(shape: Any, factor: float, pieces: int) -> None:
    """Counted step by step, in tokens of every source, against the integral of the ramp."""
    begin, length, tokens = 10, 640, 256
    stage = Stage(
        from_step=begin,
        weights={"web": 1, "code": 2, "math": 1},
        ramp=Ramp(until_step=begin + length, shape=shape, pieces=pieces),
    )
    schedule = Schedule(
        BIG, names=NAMES, weights=[8, 2, 0], tokens_per_step=tokens, seed=5, stages=[stage]
    )
    old, new = np.array([0.8, 0.2, 0.0]), np.array([0.25, 0.5, 0.25])
    taken, wanted, worst = np.zeros(3), np.zeros(3), 0.0
    for step in range(begin + length + 50):
        content = schedule.step(step)
        source, _ = schedule.samples.locate(content.sample_ids)
        taken += np.bincount(source, minlength=3) * content.capacity
        x = [min(max((step + d - begin) / length, 0), 1) for d in (0, 0.5, 1)]
        simpson = np.dot([1, 4, 1], [progress(shape, at) for at in x]) / 6
        wanted += tokens * (old + (new - old) * simpson)
        worst = max(worst, np.abs(taken - wanted).max())
    between = np.abs(new - old).max() * length / (8 * pieces**2) * factor * tokens
    assert worst < between + 1.69 * (pieces + 2) * (8 + 16)
    assert worst < 0.02 * length * tokens  # and not only because the bound is wide
    plan = plan_run(schedule, begin + length)
    assert f"steps 10 to {begin + length - 1}: a ramp in {pieces} pieces" in str(plan)


def schedule_of(*stages: Stage, **options: Any) -> Schedule:
    arguments = {"weights": [1.0, 3.0, 0.0], "tokens_per_step": 96, "seed": 1, **options}
    return Schedule(BIG, names=NAMES, stages=stages, **arguments)


RAMP = Stage(from_step=10, weights={"math": 1}, ramp=Ramp(until_step=50, pieces=4))


def begins(schedule: Schedule) -> list[int]:
    return [stage.begin for stage in schedule.stages]


def test_a_ramp_may_end_at_a_number_of_tokens() -> None:
    by_tokens = Stage(
        from_step=10,
        weights={"math": 1},
        tokens_per_step=192,
        ramp=Ramp(until_tokens=96 * 10 + 192 * 40 - 1, pieces=4),
    )
    assert begins(schedule_of(by_tokens)) == begins(schedule_of(RAMP)) == [0, 10, 20, 30, 40, 50]


def test_a_stage_inside_a_ramp_lets_it_go_on_unless_it_has_weights() -> None:
    plain = schedule_of(RAMP)
    faster = schedule_of(RAMP, Stage(from_step=25, tokens_per_step=48))
    assert begins(faster) == [0, 10, 20, 25, 30, 40, 50]
    at = {stage.begin: stage for stage in faster.stages}
    assert at[25].weights == at[20].weights and at[25].config.tokens_per_step == 48
    assert [at[b].weights for b in (30, 40, 50)] == [
        stage.weights for stage in plain.stages if stage.begin >= 30
    ]
    assert at[50].config.tokens_per_step == 48
    on_an_end = schedule_of(RAMP, Stage(from_step=30, tokens_per_step=48))
    assert begins(on_an_end) == begins(plain)
    assert [s.weights for s in on_an_end.stages] == [s.weights for s in plain.stages]
    ended = schedule_of(RAMP, Stage(from_step=25, weights={"web": 1}))
    assert begins(ended) == [0, 10, 20, 25]
    turned = Stage(from_step=25, weights={"web": 1}, ramp=Ramp(until_step=29, pieces=2))
    again = schedule_of(RAMP, turned)
    assert begins(again) == [0, 10, 20, 25, 27, 29]
    reached = np.array(again.stages[2].weights)
    assert np.allclose(again.stages[3].weights, 0.75 * reached + 0.25 * np.array([1, 0, 0]))


def test_a_run_may_be_edited_in_the_middle_of_a_ramp() -> None:
    state = schedule_of(RAMP).state_dict(25)
    changes = schedule_of(RAMP, Stage(from_step=25, weights={"web": 1})).check_state(state)
    assert changes and all("weights was" in text for text in changes)
    longer = Stage(from_step=10, weights={"math": 1}, ramp=Ramp(until_step=60, pieces=4))
    with pytest.raises(ResumeError, match="weights was"):
        schedule_of(longer).check_state(state)


def test_a_ramp_to_what_there_is_already_changes_nothing() -> None:
    same = Stage(from_step=10, weights={"web": 0.25, "code": 0.75}, ramp=Ramp(until_step=50))
    later = Stage(from_step=60, weights={"math": 1})
    assert begins(schedule_of(same, later, weights=[0.25, 0.75, 0.0])) == [0, 60]


def test_a_ramp_is_written_in_a_manifest() -> None:
    tree = {
        "sources": [{"prefix": "a", "weight": 1, "name": "a"}],
        "stages": [
            {"from_step": 3, "weights": {"a": 1}, "ramp": {"until_step": 9, "shape": "cosine"}}
        ],
    }
    config = from_dict(BlendConfig, tree, where="manifest")
    assert config.stages[0].ramp == Ramp(until_step=9, shape="cosine", pieces=32)
    assert from_dict(BlendConfig, to_dict(config), where="manifest") == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ramp": {"until_step": 10}}, "begins at step 10 and its ramp ends at 10"),
        ({"ramp": {"until_tokens": 5}}, "its ramp ends at 1: let it end"),
        ({"ramp": {}}, "ends at until_step or at until_tokens"),
        ({"ramp": {"until_step": 9, "pieces": 0}}, "ramp: pieces is 0; it must be above 0"),
        ({"weights": None, "ramp": {"until_step": 20}}, "has a ramp and no weights"),
        ({"order": "grow-p2", "ramp": {"until_step": 20}}, "order grow-p2, which would begin anew"),
    ],
)
def test_ramps_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ramp = Ramp(**change.pop("ramp"))
        stage = {"from_step": 10, "weights": {"math": 1}, **change, "ramp": ramp}
        schedule_of(Stage(**stage))
    assert message in str(caught.value)


def test_sizes_are_nothing_to_go_on_from() -> None:
    with pytest.raises(ConfigError, match="the sources no weights that it could go on from"):
        Schedule(BIG, names=NAMES, tokens_per_step=96, stages=[RAMP])
