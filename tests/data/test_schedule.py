"""Laws of the schedule: every sample once per epoch, constant tokens, buckets in proportion."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from fractions import Fraction
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack import _core
from megapack.data import ORDERS, Schedule, ScheduleConfig, Stage, plan_run
from megapack.data.steps import DrawOrder
from megapack.errors import ConfigError
from megapack.packing import pack
from tests.data.corpora import packed_index, samples_of_buckets

CURRICULA = [name for name in ORDERS if name.startswith(("grow", "shrink"))]


@st.composite
def bucket_counts(draw: st.DrawFn) -> dict[int, int]:
    capacities = draw(st.sets(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=6))
    return {capacity: draw(st.integers(1, 90)) for capacity in capacities}


schedules = st.fixed_dictionaries(
    {
        "order": st.sampled_from(sorted(ORDERS)),
        "seed": st.integers(0, 2**63),
        "num_cycles": st.sampled_from([None, 1, 3, 8]),
        "tokens_per_step": st.sampled_from([32, 64, 160]),
        "cost_window": st.sampled_from([1, 1, 4]),
    }
)


def test_permutations_of_different_keys_are_spread_evenly() -> None:
    """Chi-squared over all 6! orders, and over the positions of two neighbors among many."""
    orders = Counter(tuple(_core.permute_range(key, 6, 0, 6)) for key in range(72_000))
    assert len(orders) == 720
    chi = sum((count - 100) ** 2 / 100 for count in orders.values())
    assert abs(chi - 719) < 6 * np.sqrt(2 * 719)
    size = 1500  # larger than a direct shuffle
    pairs = np.array([_core.permute_range(key, size, 700, 2) for key in range(60_000)])
    for places in (pairs[:, 0], (pairs[:, 1] - pairs[:, 0]) % size):
        counts = np.bincount(places // 15, minlength=100)
        assert abs(((counts - 600) ** 2 / 600).sum() - 99) < 6 * np.sqrt(2 * 99)


def test_a_permutation_of_2_to_the_40_needs_no_memory() -> None:
    ids = _core.permute_range(7, 2**40 + 1, 2**40 - 5, 6)
    assert len(set(ids.tolist())) == 6 and ids.max() > 2**37


@given(counts=bucket_counts(), options=schedules)
def test_samples_come_once_per_epoch(counts: dict[int, int], options: dict[str, object]) -> None:
    schedule = Schedule(samples_of_buckets(counts), **options)
    num_epochs = 2
    seen: dict[int, list[int]] = {}
    for step in map(schedule.step, range(schedule.num_steps(num_epochs))):
        assert len(step.sample_ids) * step.capacity == options["tokens_per_step"]
        assert step.bucket == sorted(counts).index(step.capacity)
        seen.setdefault(step.capacity, []).extend(step.sample_ids.tolist())
    base = 0
    for b, (capacity, count) in enumerate(sorted(counts.items())):
        stream, expected_ids = seen[capacity], list(range(base, base + count))
        unused = len(stream) - num_epochs * count
        assert 0 <= unused < schedule.stages[0].samples_per_draw[b]
        for epoch in range(num_epochs):  # exactly
            assert sorted(stream[epoch * count : (epoch + 1) * count]) == expected_ids
        base += count


@pytest.mark.parametrize("order", sorted(set(ORDERS) - {"sequential"}))
def test_the_largest_bucket_comes_first(order: str) -> None:
    index = samples_of_buckets({1: 700, 4: 90, 32: 1})
    assert Schedule(index, tokens_per_step=32, order=order, seed=3).step(0).capacity == 32


@pytest.mark.parametrize("order", CURRICULA)
def test_a_curriculum_moves_from_one_end_to_the_other_in_every_cycle(order: str) -> None:
    counts = {1: 6400, 2: 3200, 4: 1600, 8: 800}
    schedule = Schedule(samples_of_buckets(counts), tokens_per_step=8, order=order, num_cycles=4)
    capacities = 2 ** schedule.stages[0].draws.buckets(0, schedule.num_steps())
    for cycle in np.array_split(capacities, 4):
        begin, end = (part.mean() for part in np.array_split(cycle[1:], 2))
        assert begin < end if order.startswith("grow") else begin > end
    if order == "grow-p100":
        assert (np.diff(capacities[1:800]) >= 0).mean() > 0.98
    largest = ORDERS[order].odds(400)  # with a very large number of buckets
    assert max(largest) * 2**31 < float("inf") and sorted(largest) in (largest, largest[::-1])


def test_order_is_golden() -> None:
    """Golden: if these numbers change, every run in progress changes; raise ORDER_VERSION."""
    schedule = Schedule(samples_of_buckets({2: 50, 4: 30, 8: 9}), tokens_per_step=16, seed=1234)
    assert schedule.stages[0].draws.buckets(0, 12).tolist() == GOLDEN_BUCKETS
    assert schedule.step(7).sample_ids.tolist() == GOLDEN_STEP


GOLDEN_BUCKETS = [2, 0, 1, 0, 1, 0, 1, 2, 2, 1, 0, 1]
GOLDEN_STEP = [81, 80]


def test_sequential_order_is_the_order_of_the_index() -> None:
    index = packed_index()
    schedule = Schedule(index, tokens_per_step=64, order="sequential")
    steps = [schedule.step(i) for i in range(schedule.num_steps())]
    assert [step.bucket for step in steps] == sorted(step.bucket for step in steps)
    assert steps[0].sample_ids.tolist() == list(range(4))


def test_capacities_that_do_not_divide_the_step_are_refused_with_a_remedy() -> None:
    index = samples_of_buckets({7: 10, 16: 10})
    schedule = Schedule(index, tokens_per_step=64, row_tokens=32)
    assert schedule.stages[0].samples_per_draw == [2 * 4, 2 * 2]
    for tokens, row_tokens, message in (
        (64, None, "samples of 7; set tokens_per_step to 112, or row_tokens to 16"),
        (4, None, "tokens_per_step to 112, or tokens_per_step and row_tokens to 16"),
        (64, 8, "cannot hold a sample of 16; set row_tokens to 16"),
        (64, 24, "does not divide the 64 tokens of a draw; set row_tokens to 16"),
    ):
        with pytest.raises(ConfigError, match=message):
            Schedule(index, tokens_per_step=tokens, row_tokens=row_tokens)


def test_invalid_settings_are_refused() -> None:
    index = samples_of_buckets({8: 4})
    for options, message in (
        ({"order": "grow-p3"}, "order is 'grow-p3'; it must be one of"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0; it must be above 0"),
        ({"tokens_per_step": 64.0}, "tokens_per_step is 64.0; it must be an integer"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616; it must be at least 0 and below"),
        ({"cost_window": 0}, "cost_window is 0; it must be above 0"),
        ({"mix": "micro_step"}, "go together"),
        ({"micro_step_tokens": 8}, "go together"),
        ({"mix": "micro_step", "micro_step_tokens": 48}, "48 does not divide tokens_per_step 64"),
        ({"weights": [1.0, 2.0]}, "2 weights for 1 indices"),
        ({"names": ["a", "b"]}, "2 names for 1 indices"),
        (
            {"config": ScheduleConfig(tokens_per_step=64)},
            "tokens_per_step are given next to config, which contains them: give one of",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Schedule(index, **{"tokens_per_step": 64, **options})
    for name in ("x.samples", Path("x.samples"), ["x.samples"]):
        with pytest.raises(ConfigError, match=r"give SampleIndex\.load\('x\.samples'\)"):
            Schedule(name, tokens_per_step=64)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no sample index"):
        Schedule([], tokens_per_step=64)


def test_integers_of_numpy_are_kept_as_json() -> None:
    index, five = samples_of_buckets({8: 4}), np.int64(5)
    stage = Stage(from_step=five, tokens_per_step=np.int32(32), weights={"a": np.float32(0.5)})
    how = {"names": ["a"], "weights": [1], "stages": [stage]}
    schedule = Schedule([index], tokens_per_step=np.int64(64), seed=five, **how)
    state = schedule.state_dict(step=5)
    assert schedule.resume_step(json.loads(json.dumps(state))) == 5
    assert pickle.loads(pickle.dumps(state)) == state


@pytest.mark.parametrize("order", ORDERS)
def test_schedules_can_be_pickled(order: str) -> None:
    schedule = Schedule(packed_index(), tokens_per_step=256, order=order, cost_window=3)
    unpickled = pickle.loads(pickle.dumps(schedule))
    for i in range(5):
        assert unpickled.step(i).sample_ids.tolist() == schedule.step(i).sample_ids.tolist()


def test_bucket_below_a_draw_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    schedule = Schedule(samples_of_buckets({8: 40, 16: 3}), tokens_per_step=64)
    assert "bucket 16 has 3 samples and a draw needs 4" in caplog.text
    [first] = [step for i in range(6) if (step := schedule.step(i)).capacity == 16]
    assert sorted(set(first.sample_ids.tolist())) == [40, 41, 42]


def test_micro_steps_have_different_buckets() -> None:
    index = samples_of_buckets({2: 400, 8: 100, 32: 25})
    schedule = Schedule(index, tokens_per_step=128, mix="micro_step", micro_step_tokens=32, seed=2)
    steps = [schedule.step(i) for i in range(schedule.num_steps())]
    assert all(len(step.draws) == 4 for step in steps)
    assert any(len({draw.bucket for draw in step.draws}) > 1 for step in steps)
    assert all(len(d.sample_ids) * d.capacity == 32 for step in steps for d in step.draws)
    seen = np.concatenate([step.sample_ids for step in steps])
    assert set(seen.tolist()) == set(range(525))


def spread_of_costs(schedule: Schedule, num_steps: int) -> float:
    """Return the largest over mean cost of the samples of a step, mean over steps."""
    cost = schedule.samples.attention_cost
    costs = [cost(schedule.step(i).sample_ids, 64) for i in range(num_steps)]
    return float(np.mean([of_step.max() / of_step.mean() for of_step in costs]))


def test_cost_windows_give_draws_samples_of_similar_cost() -> None:
    """Cover epochs that end inside a window, blended sources, and a stage that ends the window."""
    lengths = [np.random.default_rng(0).integers(2, high, 9_000) for high in (64, 40)]
    short, long = (pack(of_source, "concat", buckets=[64]) for of_source in lengths)
    options = {"tokens_per_step": 64 * 8, "seed": 1}
    stages = [Stage(from_step=150, weights={"a": 1, "b": 2}, tokens_per_step=64 * 16)]
    blend = {"weights": [2, 1], "names": ["a", "b"], "stages": stages}
    for index, more in ((short, {}), ([short, long], blend)):
        plain = Schedule(index, **options, **more)
        window = Schedule(index, **options, **more, cost_window=32)
        num_steps = 2 * plain.stages[0].steps_per_epoch
        unlike = spread_of_costs(plain, num_steps) - 1
        assert spread_of_costs(window, num_steps) - 1 < unlike / (2 if more else 4)
        samples = window.samples
        means = [samples.attention_cost(window.step(i).sample_ids, 64).mean() for i in range(32)]
        assert np.abs(np.corrcoef(means, np.arange(32))[0, 1]) < 0.6  # ranks are random


def test_order_of_cost_windows_is_golden() -> None:
    """Golden: if these numbers change, every run in progress changes; raise ORDER_VERSION."""
    lengths = np.random.default_rng(5).integers(1, 17, 400)
    indices = [
        pack(of_source, "bucket", buckets=[8, 16]) for of_source in (lengths[:300], lengths[300:])
    ]
    schedule = Schedule(indices, weights=[2, 1], tokens_per_step=64, seed=9, cost_window=4)
    assert schedule.step(5).sample_ids.tolist() == GOLDEN_WINDOW_STEPS[0]
    assert schedule.step(200).sample_ids.tolist() == GOLDEN_WINDOW_STEPS[1]


GOLDEN_WINDOW_STEPS = ([204, 113, 94, 77], [160, 161, 202, 126])


@given(counts=bucket_counts(), num_steps=st.integers(0, 60))
def test_plan_counts_the_content_of_steps(counts: dict[int, int], num_steps: int) -> None:
    schedule = Schedule(samples_of_buckets(counts), tokens_per_step=32, seed=4)
    plan = plan_run(schedule, num_steps)
    drawn = Counter(schedule.step(i).capacity for i in range(num_steps))
    planned = {b.capacity: b.num_draws for s in plan.stages for b in s.buckets}
    assert +Counter(planned) == drawn
    total = sum(count * capacity for capacity, count in counts.items())
    assert plan.datasets[0].epochs == pytest.approx(num_steps * 32 / total)
    assert f"{num_steps} steps" in str(plan)


@st.composite
def draw_orders(draw: st.DrawFn) -> DrawOrder:
    buckets = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=6)
    samples, per_draw = zip(*draw(buckets), strict=True)
    order = ORDERS[draw(st.sampled_from(sorted(ORDERS)))]
    num_cycles, seed = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(0, 2**63))
    sizes = {"samples_per_epoch": samples, "samples_per_draw": per_draw}
    return DrawOrder(**sizes, order=order, num_cycles=num_cycles, seed=seed)


@given(draws=draw_orders(), end=st.integers(0, 150))
def test_draws_of_a_bucket_are_consecutive(draws: DrawOrder, end: int) -> None:
    turns: Counter[int] = Counter()
    for draw in range(end):
        bucket, turn = draws.locate(draw)
        assert turn == turns[bucket]
        turns[bucket] += 1
    buckets = draws.buckets(0, end).tolist()
    assert buckets == [draws.locate(draw)[0] for draw in range(end)]
    num_buckets = len(draws.samples_per_draw)
    assert draws.counts(end).tolist() == [turns[b] for b in range(num_buckets)]


@given(draws=draw_orders(), cycles=st.integers(0, 10))
def test_cycles_have_the_fewest_draws_for_their_samples(draws: DrawOrder, cycles: int) -> None:
    """drawn(b, c) = ceil(c * samples / (cycles per epoch * samples per draw)), exactly."""
    counts = draws.counts(draws.begin(cycles)).tolist()
    for b, (samples, per_draw) in enumerate(
        zip(draws.samples_per_epoch, draws.samples_per_draw, strict=True)
    ):
        needed = ceil(Fraction(cycles * samples, draws.num_cycles * per_draw))
        assert counts[b] == draws.drawn(b, cycles) == needed


@given(draws=draw_orders(), far=st.integers(10**6, 10**15), back=st.integers(0, 200))
def test_draws_far_ahead_are_located(draws: DrawOrder, far: int, back: int) -> None:
    """Induction step of the test above, anywhere: the next draw of a bucket has the next number."""
    begin = far - back
    counts = draws.counts(begin).tolist()
    for draw in range(begin, begin + 40):
        bucket, turn = draws.locate(draw)
        assert turn == counts[bucket] and draws.draw_at(bucket, turn) == draw
        counts[bucket] += 1
    assert draws.counts(begin + 40).tolist() == counts
